"""A publisher in a process of its own, with an S3 server beside it if it is told so. Commands: `publish`."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, cast

from pydantic import BaseModel

from weightcast.manifest.store import Store, open_store
from weightcast.publisher import Publisher, PublisherSettings

from .models import ModelSpec
from .seaweed import Seaweed, seaweed
from .side import say
from .witness import Witness


class CasterJob(BaseModel):
    """What a caster is to do.

    Attributes:
        model: to publish; version 0 is published at the start.
        root: of the stream; "": on an S3 server that it starts itself.
        address: of that server.
        settings: of the publisher.
    """

    model: ModelSpec
    root: str = ""
    address: str = "127.0.0.1"
    settings: dict[str, Any] = {}


def main() -> None:
    """Publish a version at each command, and say when it was committed, by the clock that all processes share."""
    job = CasterJob.model_validate_json(sys.argv[1])
    with ExitStack() as stack:
        server = Seaweed(job.root, {}) if job.root else stack.enter_context(seaweed(job.address))
        source = job.model.make()
        model = source.tensors()
        store = Witness(open_store(server.root), lambda: say("created"))
        settings = PublisherSettings(**job.settings)
        publisher = stack.enter_context(Publisher(server.root, settings, store=cast(Store, store)))
        manifest = publisher.publish(model, step=0).wait()
        say("ready", **asdict(server), dense_bytes=manifest.totals.dense_bytes)
        for _ in sys.stdin:
            source.move(model)
            began = time.monotonic()
            pending = publisher.publish(model, step=manifest.version + 1)
            returned = time.monotonic()
            manifest = pending.wait()
            say(
                "committed",
                version=manifest.version,
                began=began,
                returned=returned,
                asked=store.asked_at,
                at=store.answered_at,
                bytes=manifest.totals.bytes + len(manifest.encode()),
            )


if __name__ == "__main__":
    main()

"""A publisher in a process of its own, with an S3 server beside it if it is told so. Commands: `publish`."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from typing import Any

from pydantic import BaseModel

from weightcast.publisher import Publisher, PublisherSettings

from .models import ModelSpec
from .seaweed import seaweed
from .side import say


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
        root, environment = job.root, dict[str, str]()
        if not root:
            server = stack.enter_context(seaweed(job.address))
            root, environment = server.root, server.environment
        source = job.model.make()
        model = source.tensors()
        publisher = stack.enter_context(Publisher(root, PublisherSettings(**job.settings)))
        manifest = publisher.publish(model, step=0).wait()
        say("ready", root=root, environment=environment, dense_bytes=manifest.totals.dense_bytes)
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
                at=time.monotonic(),
                bytes=manifest.totals.bytes + len(manifest.encode()),
            )


if __name__ == "__main__":
    main()

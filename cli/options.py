"""Options that commands share, and what they open."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from weightcast.manifest.store import Store
    from weightcast.manifest.stream import StreamReader

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class StoreOptions:
    """How to reach the store, as the command line says; None: as the environment says."""

    endpoint_url: str | None = None
    region: str | None = None
    addressing: str | None = None
    checksum: str | None = None
    connect_timeout_s: float | None = None
    read_timeout_s: float | None = None
    max_attempts: int | None = None
    deadline_s: float | None = None

    def settings(self, **others: Any) -> Any:
        """As `StoreSettings`, with `others` beside what the command line said."""
        from weightcast.manifest.store.types import StoreSettings

        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return StoreSettings(**given, **others)

    def open(self, root: str, **others: Any) -> Store:
        """The store at `root`, untouched."""
        from weightcast.manifest.store import open_store

        return open_store(root, settings=self.settings(**others), option="ROOT")

    def reader(self, root: str) -> StreamReader:
        """The stream at `root`."""
        from weightcast.manifest.stream import StreamReader

        return StreamReader.open(self.open(root))


root_argument = click.argument("root", metavar="ROOT")
json_option = click.option("--json", "as_json", is_flag=True, help="Write one JSON document to stdout.")


def store_options(command: F) -> F:
    """Adds the options of the store, and `--debug`; the command gets them as `store`, a `StoreOptions`."""

    @functools.wraps(command)
    def wrapped(**given: Any) -> Any:
        names = [f.name for f in fields(StoreOptions)]
        store = StoreOptions(**{name: given.pop(name) for name in names})
        return command(store=store, **given)

    for option in reversed(_STORE_OPTIONS):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]


_STORE_OPTIONS = [
    click.option("--endpoint-url", metavar="URL", help="S3-compatible endpoint (also: AWS_ENDPOINT_URL)."),
    click.option("--region", help="S3 region (also: AWS_DEFAULT_REGION)."),
    click.option(
        "--addressing", type=click.Choice(["auto", "path", "virtual"]), help="Where S3 URLs have the bucket."
    ),
    click.option(
        "--checksum", type=click.Choice(["auto", "when_required"]), help="Checksums of the S3 client."
    ),
    click.option(
        "--connect-timeout", "connect_timeout_s", type=float, metavar="S", help="Seconds for one connection."
    ),
    click.option(
        "--read-timeout", "read_timeout_s", type=float, metavar="S", help="Seconds for each wait for bytes."
    ),
    click.option("--max-attempts", type=int, metavar="N", help="Tries of one request."),
    click.option(
        "--deadline", "deadline_s", type=float, metavar="S", help="Seconds for a request with all its tries."
    ),
    click.option("--debug", is_flag=True, expose_value=False, help="On a failure write the traceback, too."),
]

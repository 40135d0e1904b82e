"""`weightcast verify`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import click

from .options import StoreOptions, json_option, root_argument, store_options
from .output import write, write_fields, write_json, write_table
from .text import size

if TYPE_CHECKING:
    from weightcast.manifest.inspect.findings import VerifyReport

_EXIT_CODES: Final = {"untrusted": 12, "unsupported": 12, "corrupt": 13, "gap": 14, "storage": 15}
"""By the kind of a problem, gravest first: the first one that occurs decides."""


@click.command("verify")
@root_argument
@click.option("--version", type=click.IntRange(min=0), help="Check up to this version only.")
@click.option("--deep", is_flag=True, help="Rebuild every version, too, and compare state digests.")
@click.option(
    "--engine",
    type=click.Choice(["vllm"]),
    help="Instead, prove the live weights of a server of this kind against the stream.",
)
@click.option("--url", metavar="URL", help="The engine's server.")
@json_option
@store_options
@click.pass_context
def command(
    context: click.Context,
    root: str,
    version: int | None,
    deep: bool,
    engine: str | None,
    url: str | None,
    as_json: bool,
    store: StoreOptions,
) -> None:
    """Check everything in a stream and list all damage.

    Checks the hash chain of all versions, and size, SHA-256 and structure of all that they name. Data below
    the floor was pruned and is not missed. With --engine: whether the weights that a server generates with are
    the version that it says it holds.
    """
    if (engine is None) != (url is None) or (engine is not None and (deep or version is not None)):
        raise click.UsageError("--engine and --url go together, and without --version and --deep")
    if url is not None:
        from .verify_engine import verify_engine

        context.exit(verify_engine(store.reader(root), url, as_json=as_json))
    from weightcast.manifest.inspect.verify import verify

    report = verify(store.reader(root), version, deep, progress=_progress())
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[K")  # the last line of progress
    if as_json:
        write_json({"ok": report.ok, **asdict(report)})
    else:
        _write_report(report)
    kinds = {p.kind for p in report.problems}
    context.exit(next((code for kind, code in _EXIT_CODES.items() if kind in kinds), 1) if kinds else 0)


def _write_report(report: VerifyReport) -> None:
    objects = f"{report.shards} shards, {report.snapshots} snapshots, {size(report.bytes)}"
    write_fields(
        [
            ("stream", report.url),
            ("checked", f"{report.manifests} versions, {objects}"),
            ("rebuilt", f"{report.rebuilt} versions" if report.deep else None),
            *(("not checked", sentence) for sentence in report.unchecked),
            ("problems", len(report.problems) or "none"),
        ]
    )
    if report.problems:
        write("\n")
        rows = ((p.version, p.kind, p.object, p.message) for p in report.problems)
        write_table(("version", "kind", "object", "problem"), rows)


def _progress() -> Callable[[str, int], None] | None:
    """On a terminal, a line on stderr that says how far it is, a few times a second."""
    if not sys.stderr.isatty():
        return None
    last = [0.0]

    def tell(what: str, count: int) -> None:
        if time.monotonic() - last[0] > 0.2:
            last[0] = time.monotonic()
            sys.stderr.write(f"\r{what}: {count}\x1b[K\r")
            sys.stderr.flush()

    return tell

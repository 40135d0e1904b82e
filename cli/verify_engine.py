"""`weightcast verify --engine`: an engine's live weights against a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .output import write, write_fields, write_json

if TYPE_CHECKING:
    from weightcast.manifest.stream import StreamReader
    from weightcast.schemas.engine import VerifyReport

_CORRUPT: Final = 13


def verify_engine(reader: StreamReader, url: str, *, as_json: bool) -> int:
    """Have the engine digest all its weights, compare, and say the outcome; returns the exit code.

    Raises:
        NotFound: the engine does not say which version it holds, or the stream has no such version.
        Untrusted: it holds a version of another stream, or of a history that was rewritten.
        StorageError, UsageError: as `EngineClient`.
    """
    from weightcast.schemas.engine import VerifyRequest
    from weightcast.schemas.errors import NotFound, Untrusted
    from weightcast.subscriber.engines.client import EngineClient

    client = EngineClient(url)
    held = client.state().held
    if held is None:
        raise NotFound(
            f"the engine at {client.url} holds no version, or its ranks do not agree on one",
            hint="its subscriber brings it to one",
        )
    if held.stream != reader.stream.stream:
        raise Untrusted(
            f"the engine at {client.url} holds version {held.version} of stream {held.stream}; "
            f"{reader.store.url} is stream {reader.stream.stream}"
        )
    position = reader.position(held.version)
    if position.sha256 != held.sha256:
        raise Untrusted(
            f"version {held.version} has SHA-256 {position.sha256}, but the engine at {client.url} was given "
            f"{held.sha256}",
            hint="the history was rewritten",
        )
    report = client.verify(VerifyRequest())
    problems = list(report.faults)
    if report.held != held:
        problems.append("the engine went to another version meanwhile; try again")
    elif held.digest != position.manifest.digest_after:
        problems.append(f"it was given digest {held.digest}, the stream has {position.manifest.digest_after}")
    elif not report.good and not problems:
        problems.append(f"the live bits have digest {report.digest}")
    _write(client.url, held.version, position.manifest.digest_after, report, problems, as_json=as_json)
    return _CORRUPT if problems else 0


def _write(
    url: str, version: int, digest: str, report: VerifyReport, problems: list[str], *, as_json: bool
) -> None:
    if as_json:
        write_json(
            {
                "ok": not problems,
                "engine": f"vllm at {url}",
                "version": version,
                "digest": digest,
                "live_digest": report.digest,
                "ranks": len(report.ranks),
                "seconds": report.seconds,
                "problems": problems,
            }
        )
        return
    write_fields(
        [
            ("engine", f"vllm at {url}"),
            ("version", version),
            ("checked", f"{len(report.ranks)} ranks in {report.seconds:.1f} s"),
            ("problems", len(problems) or "none"),
        ]
    )
    for problem in problems:
        write(f"\n{problem}\n")

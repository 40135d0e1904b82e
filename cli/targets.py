"""From the options of `weightcast subscribe` to what is kept at the newest version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

import click

from weightcast.schemas.engine import PauseMode

if TYPE_CHECKING:
    from weightcast.schemas.settings import SubscriberSettings
    from weightcast.subscriber import Target


@dataclass(frozen=True)
class Chosen:
    """What the command line says about the target."""

    into: Path | None
    engine: str | None
    url: str | None
    mirror: Path | None

    def open(self, settings: SubscriberSettings) -> Target:
        """The target, not touched yet.

        Raises:
            click.UsageError: options that do not go together, or one that is missing.
        """
        if self.engine is not None:
            if self.url is None:
                raise click.UsageError("--engine needs --url")
            return ENGINES[self.engine](self, settings)
        if self.into is None:
            raise click.UsageError("--into DIR or --engine NAME says what to keep at the newest version")
        given = [
            name for name, value in (("--url", self.url), ("--mirror", self.mirror)) if value is not None
        ]
        if given:
            raise click.UsageError(f"{given[0]} goes with --engine alone")
        from weightcast.subscriber import CheckpointFolder

        return CheckpointFolder(self.into)

    def told(self) -> dict[str, str | None]:
        """What it is, for the documents of `--json`."""
        folder = self.into or self.mirror
        return {
            "folder": None if folder is None else str(folder.resolve()),
            "engine": None if self.engine is None else f"{self.engine} at {self.url}",
        }


def _vllm(chosen: Chosen, settings: SubscriberSettings) -> Target:
    from weightcast.subscriber import VllmServer

    if chosen.into is not None:
        raise click.UsageError("--into does not go with --engine vllm; --mirror may be meant")
    return VllmServer(
        chosen.url or "", mirror=chosen.mirror, pause=settings.pause, verify_every=settings.verify_every
    )


def _sglang(chosen: Chosen, settings: SubscriberSettings) -> Target:
    from weightcast.subscriber import SglangServer

    if chosen.into is None:
        raise click.UsageError("--engine sglang needs --into DIR: the folder that the server is loaded from")
    if chosen.mirror is not None:
        raise click.UsageError("--mirror does not go with --engine sglang, whose folder is --into")
    if settings.pause == "wait":
        raise click.UsageError(
            "SGLang cannot finish requests before an update: --pause keep or --pause abort"
        )
    return SglangServer(
        chosen.url or "",
        chosen.into,
        pause="retract" if settings.pause == "keep" else "abort",
        verify_every=settings.verify_every,
    )


ENGINES: Final[dict[str, Callable[[Chosen, SubscriberSettings], Target]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
}
"""For each `--engine` what opens it."""

PAUSES: Final[tuple[str, ...]] = get_args(PauseMode)


def paused_s(target: Target) -> float | None:
    """Seconds that an engine was paused to come to its version; None if it was not, or there is no engine."""
    found = getattr(target, "paused_s", None)
    return found if isinstance(found, float) else None

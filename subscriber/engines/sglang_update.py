"""One update of an SGLang server's weights from a folder: which calls, in which order, and what a refusal leads to.

    no other load under way → pause → load, twice if need be → flush, until it succeeds; stored caches, too →
    confirm → continue

Whatever fails leaves the server paused: it never generates between two versions. Doing all of it again is always right.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from weightcast.schemas.errors import Corrupt, UsageError

from .sglang_http import Answer, PauseMode, Served, SglangApi

log = logging.getLogger(__name__)

_LOADS: Final = (
    2  # SGLang rolls back by reading the new path, so a load that failed once is simply done again
)
_FLUSH_POLL_S: Final = 0.2


class Update:
    """Updates of the server behind `api`; see SglangServer for the settings."""

    def __init__(
        self,
        api: SglangApi,
        *,
        pause: PauseMode,
        load_format: str | None,
        flush_s: float,
        verify_every: int,
    ) -> None:
        if pause not in ("abort", "retract"):
            raise UsageError(f"pause mode {pause!r} cannot be used with SGLang", hint="abort or retract")
        self._api = api
        self._pause: PauseMode = pause
        self._load_format = load_format
        self._flush_s = flush_s
        self._verify_every = verify_every
        self._changes = 0
        self._before: str | None = (
            None  # checksums of the weights that are to change, until it is seen that they did
        )

    def run(self, path: str, label: str, *, changed: bool) -> float:
        """Have the server read `path` and call it `label`.

        Args:
            path: a checkpoint folder that it was never given before.
            label: the version.
            changed: the weights there differ from those that the server is believed to have.

        Returns:
            Seconds that it was paused.

        Raises:
            Corrupt: it refuses, or what it says of itself afterwards does not fit; it stays paused.
            StorageError: it went away, or takes too long; if it is there still, it is paused.
            UsageError: a route is missing, or the key does not fit.
        """
        outside = self._api.wait_idle()
        if changed and self._before is None and self._is_verified():
            self._before = self._api.checksum()
        began = time.monotonic()
        self._expect(self._api.pause(self._pause), "does not pause")
        self._load(path, label)
        self._flush()
        if outside:
            self._expect(self._api.clear_storage(), "keeps the stored cache of the old weights")
        self._confirm(Served(label, path))
        self._expect(self._api.resume(), "does not continue")
        self._changes += changed
        return time.monotonic() - began

    def _is_verified(self) -> bool:
        return self._verify_every > 0 and self._changes % self._verify_every == 0

    def _load(self, path: str, label: str) -> None:
        reason = ""
        for _ in range(_LOADS):
            answer = self._load_once(path, label)
            if answer.good:
                return
            reason = answer.reason
            log.warning("%s refuses %s: %s", self._api.url, path, reason)
            self._flush()  # a load that went well is refused as well if the old cache could not be dropped
        raise Corrupt(
            f"{self._api.url} does not load {path}: {reason}",
            hint="its log says why; if it keeps refusing, restart it on the folder",
        )

    def _load_once(self, path: str, label: str) -> Answer:
        answer = self._ask_to_load(path, label)
        if answer.good or "begin_weight_update" not in answer.reason:
            return answer
        if not self._api.begin().good:  # one was left open by a driver that is no more
            self._api.end()
            self._expect(self._api.begin(), "opens no session for the update")
        answer = self._ask_to_load(path, label)
        ended = self._api.end()
        return answer if ended.good or not answer.good else ended

    def _ask_to_load(self, path: str, label: str) -> Answer:
        return self._api.load(path, label, load_format=self._load_format, abort=self._pause == "abort")

    def _flush(self) -> None:
        until = time.monotonic() + self._flush_s
        while not (answer := self._api.flush()).good:
            if time.monotonic() > until:
                raise Corrupt(
                    f"{self._api.url} did not drop the cache of the old weights in {self._flush_s:g} s: "
                    f"{answer.reason}",
                    hint="requests that never end keep it; pause mode abort ends them",
                )
            time.sleep(_FLUSH_POLL_S)

    def _confirm(self, given: Served) -> None:
        served = self._api.served()
        if served != given:
            raise Corrupt(
                f"{self._api.url} was given {given.path} as {given.label!r}, and says that it serves "
                f"{served.path} as {served.label!r}"
            )
        if self._before is not None and self._api.checksum() == self._before:
            raise Corrupt(
                f"{self._api.url} answers success to {given.path}, but by its own checksums no weight changed",
                hint="something answers in the server's place, or it loads none of the tensors that changed",
            )
        self._before = None

    def _expect(self, answer: Answer, otherwise: str) -> None:
        if not answer.good:
            raise Corrupt(f"{self._api.url} {otherwise}: {answer.reason}")

"""Installs and loads: asking for them, and what is done when one fails or its outcome is not known."""

from __future__ import annotations

import logging
from typing import Final, NoReturn

from weightcast.schemas.engine import Held, InstallReport, InstallRequest, LoadRequest, ServerState
from weightcast.schemas.errors import Conflict, Corrupt, StorageError, UsageError, WeightcastError

from .client import EngineClient
from .staging import Staging

log = logging.getLogger(__name__)

GIVE_UP_AFTER: Final = 3
"""Failures in a row after which an install is no longer finished, but its engine given a whole version."""


class Installs:
    """Changes one engine. A request is kept in `staging` until its outcome is known, whoever dies meanwhile.

    Every method raises:
        StorageError, UsageError: nothing was written; the engine serves what it did before.
        Corrupt: it is not sure what the engine holds, or it is paused between two versions.
        Conflict: another subscriber has taken it over.
    """

    def __init__(self, client: EngineClient, staging: Staging) -> None:
        self._client = client
        self._staging = staging
        self._failures = 0

    def install(self, request: InstallRequest) -> InstallReport:
        """Go to a version by the staged values of `request`."""
        self._staging.keep(request)
        try:
            return self._confirmed(self._try_twice(request), request.target)
        except (Corrupt, StorageError, UsageError) as error:
            self._failed(error)
            if self._is_untouched(request.base):
                self._staging.forget()
            self._explain(error, request.base, request.target)

    def load(self, request: LoadRequest, before: Held | None) -> InstallReport:
        """Go to a version by whole tensors; `before` is what the engine holds."""
        self._staging.forget()  # what was being installed does not matter any more
        try:
            return self._confirmed(self._client.load(request), request.target)
        except (Corrupt, StorageError, UsageError) as error:
            self._failed(error)
            self._explain(error, before, request.target)

    @property
    def pending(self) -> bool:
        """Whether there is an install whose outcome is not known."""
        return self._staging.kept() is not None

    def finish(self, state: ServerState) -> InstallReport | None:
        """Finish the install whose outcome is not known, if there is one, on an engine that is in `state`.

        None if there is none, or if it failed too often: then the engine has to be given a whole version.
        """
        request = self._staging.kept()
        if request is None:
            return None
        done = state.held == request.target and not state.paused
        if done or any(row.session != request.session for row in state.ranks):
            self._staging.forget()  # or it is of an engine, or a subscriber, that is no more
            return None
        log.warning("finishing the install of version %d", request.target.version)
        try:
            return self._confirmed(self._client.install(request), request.target)
        except (Corrupt, StorageError, UsageError, Conflict) as error:
            self._failed(error)
            if self._failures >= GIVE_UP_AFTER or isinstance(error, UsageError | Conflict):
                self._staging.forget()
                return None
            raise Corrupt(
                f"version {request.target.version} is not installed: {error.message}", hint=error.hint
            ) from error

    def succeeded(self) -> None:
        """The engine is whole: failures from here on are new ones."""
        self._failures = 0

    def _try_twice(self, request: InstallRequest) -> InstallReport:
        """Install; once more if the engine is left between two versions, or the answer was lost."""
        try:
            return self._client.install(request)
        except (Corrupt, StorageError) as error:
            if isinstance(error, Corrupt) and self._is_untouched(request.base):
                raise
            log.warning("installing version %d once more: %s", request.target.version, error)
            return self._client.install(request)

    def _confirmed(self, report: InstallReport, target: Held) -> InstallReport:
        if report.held != target or any(row.held != target for row in report.ranks):
            raise Corrupt(
                f"{self._client.url} was given version {target.version}, and says that it holds another"
            )
        self._staging.forget()
        self.succeeded()
        log.info(
            "the engine was paused for %.3f s: %.3f s until it stood still, %.3f s to write and read back",
            report.paused_s,
            report.drain_s,
            report.write_s,
        )
        return report

    def _explain(self, error: WeightcastError, before: Held | None, target: Held) -> NoReturn:
        """Raise `error` as what it means for the target."""
        if not isinstance(error, Corrupt) and self._is_untouched(before):
            raise error
        raise Corrupt(
            f"version {target.version} is not confirmed by the engine at {self._client.url}: {error.message}",
            hint=error.hint or "it is tried again; meanwhile the engine may stay paused",
        ) from error

    def _is_untouched(self, before: Held | None) -> bool:
        """Whether the engine serves, whole, what it held before."""
        try:
            state = self._client.state()
        except WeightcastError:
            return False
        return not state.paused and state.held == before and all(row.whole for row in state.ranks)

    def _failed(self, error: WeightcastError) -> None:
        self._failures += 1
        if self._failures == GIVE_UP_AFTER:
            log.error("the engine at %s failed %d times: %s", self._client.url, self._failures, error)

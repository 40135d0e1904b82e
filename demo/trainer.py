"""The trainer's process: learns from fresh rollouts, publishes each step, follows the script of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from weightcast.publisher import PendingVersion, Publisher
from weightcast.schemas.errors import WeightcastError
from weightcast.schemas.manifest import VersionManifest

from .config import VICTIM, WORKERS, DemoConfig
from .crew import Crew
from .display import Board
from .intake import Intake
from .learner import Learner, StepStats
from .messages import Finish, Job, Proof
from .outcome import Return, Row, SubscriberOutcome
from .proof import compare, prove
from .rollout import Rollouts

_LOOK_S: Final = 0.005  # seconds between two looks for batches
_PATIENCE_S: Final = 120.0  # seconds without a batch, or a proof, after which something is wrong


@dataclass(frozen=True)
class _Published:
    """A version on its way, and the step that made it; None for the initial weights."""

    pending: PendingVersion
    stats: StepStats | None


class Trainer:
    """One run. The crew must be started, and the publisher open; neither is closed here.

    Args:
        config: of the run.
        root: of the stream, for the subscribers.
        store: fields of `StoreSettings`, likewise.
        safe_point: called where the run may be broken off, by what it raises: at each step, and while waiting.
    """

    def __init__(
        self,
        config: DemoConfig,
        crew: Crew,
        publisher: Publisher,
        intake: Intake,
        board: Board,
        *,
        root: str,
        store: Mapping[str, Any],
        safe_point: Callable[[], None] = lambda: None,
    ) -> None:
        self.rows: list[Row] = []
        self._config, self._crew, self._publisher = config, crew, publisher
        self._intake, self._board = intake, board
        self._root, self._store, self._safe_point = root, dict(store), safe_point
        self._learner = Learner(config.policy, config.learner, seed=config.seed)
        self._active = set(WORKERS)  # whose batches a step waits for
        self._killed_at = self._restarted_at = 0  # versions
        self._used_before = 0  # batches

    def run(self) -> VersionManifest:
        """Train all steps, publish each, and return the manifest of the last, committed."""
        self._safe_point()
        current = self._publish(None)
        first = current.pending.wait().version  # the subscribers need a stream to open
        for name in WORKERS:
            self._assign(name, first, incarnation=0)
        for _ in range(self._config.steps):
            self._safe_point()
            self._follow_script()
            stats = self._learner.step(self._gather())
            self._add_row(current)
            current = self._publish(stats)
        manifest = current.pending.wait()
        self._finish(manifest.version)
        self._add_row(current)
        return manifest

    def proof(self, version: int) -> Proof:
        """Which bits the trainer's weights have, which are those of `version`."""
        return prove(version, self._learner.bf16_state())

    def outcomes(self, trainer: Proof) -> list[SubscriberOutcome]:
        """What each subscriber came to, after `run`."""
        found = []
        for name, process in self._crew.running.items():
            if process.proof is None:
                raise WeightcastError(f"subscriber {name} has sent no proof")
            found.append(
                SubscriberOutcome(
                    name=name,
                    version=process.proof.version,
                    digest=process.proof.digest,
                    batches=self._intake.used[name],
                    stale=self._intake.stale[name],
                    verdict=compare(trainer, process.proof),
                    returned=self._return() if name == VICTIM else None,
                )
            )
        return sorted(found, key=lambda outcome: outcome.name)

    def _publish(self, stats: StepStats | None) -> _Published:
        """Publish the learner's weights. The commit happens beside the next step."""
        state = self._learner.bf16_state()
        return _Published(self._publisher.publish(state, step=self._learner.version), stats)

    def _assign(self, name: str, first_version: int, *, incarnation: int) -> None:
        self._crew.running[name].send(
            Job(
                name=name,
                incarnation=incarnation,
                root=self._root,
                first_version=first_version,
                store=self._store,
                spool=str(self._intake.folder(name)),
                config=self._config,
            )
        )

    def _follow_script(self) -> None:
        """Kill, restart, and wait for the return, each at its step."""
        step, config = self._learner.version, self._config
        if step == config.kill_step:
            self._killed_at = self._publisher.version or 0
            pid = self._crew.kill(VICTIM)
            self._active.discard(VICTIM)
            self._board.note(f"subscriber {VICTIM} (process {pid}) killed at step {step}")
        if step == config.restart_step:
            self._restarted_at = self._publisher.version or 0
            self._used_before = self._intake.used[VICTIM]
            self._crew.start(VICTIM)
            self._assign(VICTIM, self._restarted_at, incarnation=1)
            self._board.note(f"subscriber {VICTIM} started again, with no weights")
        if step >= config.restart_step and VICTIM not in self._active:
            self._look_for_return(wait=step >= config.rejoin_step)

    def _look_for_return(self, *, wait: bool) -> None:
        """Count on the victim again once it has caught up and hands over batches."""
        process, deadline = self._crew.running[VICTIM], time.monotonic() + _PATIENCE_S
        while self._caught_up_s() is None or not self._intake.waiting(VICTIM):
            if not wait:
                return
            self._pause(f"subscriber {VICTIM} has not come back", deadline)
        self._active.add(VICTIM)
        self._board.note(
            f"subscriber {VICTIM} is back at version {process.applied}; it took {self._caught_up_s():.1f} s"
        )

    def _caught_up_s(self) -> float | None:
        """Seconds after which the victim's successor held what was the newest version at its start."""
        history = self._crew.running[VICTIM].history
        return next((seconds for seconds, version in history if version >= self._restarted_at), None)

    def _return(self) -> Return | None:
        seconds = self._caught_up_s()
        if seconds is None:
            return None
        batches = self._intake.used[VICTIM] - self._used_before
        return Return(self._killed_at, self._restarted_at, seconds, batches)

    def _gather(self) -> list[Rollouts]:
        """A fresh batch of each subscriber that takes part; waits for it."""
        missing, found = sorted(self._active), list[Rollouts]()
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            for name in list(missing):
                batch = self._intake.take(name, self._learner.version)
                if batch is not None:
                    found.append(batch)
                    missing.remove(name)
            if not missing:
                return found
            self._pause(f"no fresh rollouts from subscriber {' and '.join(missing)}", deadline)

    def _pause(self, problem: str, deadline: float) -> None:
        self._safe_point()
        self._crew.check()
        if time.monotonic() > deadline:
            raise WeightcastError(f"{problem} for {_PATIENCE_S:.0f} s")
        time.sleep(_LOOK_S)

    def _finish(self, version: int) -> None:
        """Have every subscriber go to the last version and prove its bits."""
        for process in self._crew.running.values():
            process.send(Finish(version=version))
        for process in self._crew.running.values():
            process.wait_for(lambda p: p.proof is not None, "proved its weights", _PATIENCE_S)

    def _add_row(self, published: _Published) -> None:
        """Put a version into the table, once it is committed."""
        manifest, stats = published.pending.wait(), published.stats
        row = Row(
            version=manifest.version,
            step=manifest.step or 0,
            reward=stats.reward if stats else None,
            staleness=stats.staleness if stats else None,
            changed=manifest.totals.changed,
            elements=manifest.totals.elements,
            wire_bytes=manifest.totals.bytes + len(manifest.encode()),
            dense_bytes=manifest.totals.dense_bytes,
            lags={name: self._lag(name, manifest.version) for name in WORKERS},
        )
        self.rows.append(row)
        self._board.add(row)

    def _lag(self, name: str, version: int) -> int | None:
        process = self._crew.running.get(name)
        return None if process is None or process.applied is None else max(0, version - process.applied)

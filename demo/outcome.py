"""What a run came to: values only, for the table, the summary and the JSON document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Final

from .proof import Verdict

LEAST_RISE: Final = 0.1
"""Mean reward that must be gained: ten standard errors of the mean over the 1536 positions of one step."""


@dataclass(frozen=True)
class Row:
    """One version.

    Attributes:
        version: of the stream.
        step: of the trainer.
        reward: mean verified reward of the batches that the step learned from; None for the initial weights.
        staleness: their mean age in versions; likewise.
        changed: elements whose bits differ from the version before.
        elements: in all.
        wire_bytes: what a follower fetches for it: shards and manifest. A first version has no shards.
        dense_bytes: of all tensors.
        lags: versions that each subscriber is behind when the next is about to be published; None: it does
            not run, or has applied none yet.
    """

    version: int
    step: int
    reward: float | None
    staleness: float | None
    changed: int
    elements: int
    wire_bytes: int
    dense_bytes: int
    lags: Mapping[str, int | None]

    @property
    def changed_percent(self) -> float:
        """Of the elements."""
        return 100 * self.changed / self.elements

    @property
    def ratio(self) -> float:
        """How many times smaller than the dense tensors."""
        return self.dense_bytes / self.wire_bytes


@dataclass(frozen=True)
class Return:
    """How the subscriber that was killed came back.

    Attributes:
        killed_at: version whose publication it did not survive.
        restarted_at: newest version when its successor was started, which held nothing.
        seconds: from then until it held `restarted_at` or a later version, imports included.
        batches: of the successor, that the trainer learned from.
    """

    killed_at: int
    restarted_at: int
    seconds: float
    batches: int


@dataclass(frozen=True)
class SubscriberOutcome:
    """One subscriber at the end."""

    name: str
    version: int
    digest: str
    batches: int
    stale: int
    verdict: Verdict
    returned: Return | None


@dataclass(frozen=True)
class Outcome:
    """A whole run.

    Attributes:
        root: of the stream.
        rows: all versions of the run, the initial weights first.
        digest: state digest of the trainer's last weights, taken from the tensors.
        committed: state digest in the last version's manifest.
        subscribers: both of them.
        seconds: from the start of the first process to the proofs.
    """

    root: str
    rows: Sequence[Row]
    digest: str
    committed: str
    subscribers: Sequence[SubscriberOutcome]
    seconds: float

    @property
    def rewards(self) -> tuple[float, float]:
        """Mean reward over the first and over the last tenth of the steps."""
        rewards = [row.reward for row in self.rows if row.reward is not None]
        some = max(1, len(rewards) // 10)
        return fmean(rewards[:some]), fmean(rewards[-some:])

    @property
    def wire_bytes(self) -> int:
        """Of all deltas."""
        return sum(row.wire_bytes for row in self.rows[1:])

    @property
    def dense_bytes(self) -> int:
        """What the same versions would have been, dense."""
        return sum(row.dense_bytes for row in self.rows[1:])

    @property
    def problems(self) -> list[str]:
        """What could not be proved; empty if everything was."""
        found = [
            f"subscriber {s.name}: {problem}" for s in self.subscribers for problem in s.verdict.problems
        ]
        if self.digest != self.committed:
            found.append(
                f"the trainer's state digest is {self.digest}, the last manifest says {self.committed}"
            )
        first, last = self.rewards
        if last - first < LEAST_RISE:
            found.append(
                f"the reward went from {first:.2f} to {last:.2f}, expected a rise of {LEAST_RISE} at least"
            )
        return found

    def document(self) -> dict[str, Any]:
        """The JSON document of `weightcast demo --json`."""
        first, last = self.rewards
        return {
            "root": self.root,
            "version": self.rows[-1].version,
            "steps": len(self.rows) - 1,
            "seconds": round(self.seconds, 3),
            "reward_first": first,
            "reward_last": last,
            "wire_bytes": self.wire_bytes,
            "dense_bytes": self.dense_bytes,
            "digest": self.digest,
            "proved": not self.problems,
            "problems": self.problems,
            "subscribers": [_flat(subscriber) for subscriber in self.subscribers],
            "versions": [asdict(row) for row in self.rows],
        }


def _flat(subscriber: SubscriberOutcome) -> dict[str, Any]:
    return {
        "name": subscriber.name,
        "version": subscriber.version,
        "digest": subscriber.digest,
        "tensors": subscriber.verdict.tensors,
        "tensors_equal": subscriber.verdict.equal,
        "batches": subscriber.batches,
        "stale_batches": subscriber.stale,
        "killed": asdict(subscriber.returned) if subscriber.returned else None,
    }

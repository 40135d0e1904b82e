"""Random histories against random subscribers: a folder always holds what its mark says, and reaches the head."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weightcast.manifest.retention import prune
from weightcast.manifest.store import StoreSettings, open_store
from weightcast.manifest.stream import StreamReader
from weightcast.publisher import Publisher, PublisherSettings
from weightcast.schemas.errors import StorageError
from weightcast.subscriber import CheckpointFolder, Subscriber, SubscriberSettings
from weightcast.subscriber import folder as folder_module

from ..faultstore import FaultStore, refuse
from ..versions import Bits
from .kit import Model, bits, loaded, random_like, stir

_DTYPES = (torch.bfloat16, torch.float32, torch.uint8)


class Crash(BaseException):
    """The subscriber's process is gone."""


def _crash(_: str) -> None:
    raise Crash


class Histories(RuleBasedStateMachine):
    """Versions are published, and two subscribers that may die keep one folder."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        self.folder = self.root / "model"
        self.inner = open_store(f"memory://{uuid.uuid4().hex}", settings=StoreSettings(max_attempts=1))
        self.store = FaultStore(self.inner)
        chosen = PublisherSettings(threads=1, snapshot_every=0, shard_bytes=1 << 16)
        self.publisher = Publisher("", chosen, store=self.inner, fence=False)
        self.model: Model = {
            "a": torch.zeros(300),
            "b": torch.zeros(20, 30, dtype=torch.bfloat16),
            "c": torch.zeros(()),
        }
        self.versions: list[tuple[dict[str, Bits], bytes]] = []
        self.subscribers: dict[int, Subscriber] = {}

    def teardown(self) -> None:
        for subscriber in self.subscribers.values():
            subscriber.close()
        self.publisher.close(10)
        shutil.rmtree(self.root)

    def _publish(self, *, reset: bool = False, drop: tuple[str, ...] = ()) -> None:
        config = str(len(self.versions) // 3).encode()
        self.publisher.publish(self.model, reset=reset, drop=drop, files={"config.json": config}).wait(30)
        self.publisher.wait_idle()
        if self.publisher._pipeline is not None:
            self.publisher._pipeline.snapshots.join(
                None
            )  # a listing in memory does not stand a write at the same time
        self.versions.append((bits(self.model), config))

    def _subscriber(self, which: int) -> Subscriber:
        if which not in self.subscribers:
            chosen = SubscriberSettings(threads=1, lease=False, tries=2)
            self.subscribers[which] = Subscriber("", CheckpointFolder(self.folder), chosen, store=self.store)
        return self.subscribers[which]

    @initialize()
    def first(self) -> None:
        """There is a version."""
        self._publish()

    @rule(
        seed=st.integers(0, 99),
        share=st.sampled_from([0.0, 0.01, 1.0]),
        reset=st.sampled_from([False, False, False, True]),
    )
    def change(self, seed: int, share: float, reset: bool) -> None:
        """Some elements change."""
        self.model = stir(self.model, seed, share)
        self._publish(reset=reset)

    @rule()
    def stay(self) -> None:
        """A version without changes."""
        self._publish()

    @rule(name=st.sampled_from("abcde"), length=st.integers(0, 5), dtype=st.sampled_from(_DTYPES))
    def reshape(self, name: str, length: int, dtype: torch.dtype) -> None:
        """A tensor is added, or gets another shape or dtype."""
        generator = torch.Generator().manual_seed(length)
        self.model = {**self.model, name: random_like(torch.empty(length * 10 + 1, dtype=dtype), generator)}
        self._publish()

    @rule(name=st.sampled_from("xyz"), to=st.sampled_from("abc"))
    def tie(self, name: str, to: str) -> None:
        """A second name for a tensor."""
        self.model = {**self.model, name: self.model[to]}
        self._publish()

    @precondition(lambda self: len(self.model) > 3)
    @rule()
    def remove(self) -> None:
        """A tensor goes."""
        name = next(n for n in reversed(self.model) if n not in "abc")
        self.model = {n: t for n, t in self.model.items() if n != name}
        self._publish(drop=(name,))

    @rule()
    def snapshot(self) -> None:
        """One more snapshot."""
        self.publisher.snapshot()

    @rule(keep=st.integers(1, 4))
    def pruned(self, keep: int) -> None:
        """What nobody may need any more goes."""
        clock = lambda: self.inner.clock() + timedelta(days=2)  # noqa: E731
        prune(
            StreamReader.open(self.inner),
            keep=keep,
            grace_s=0,
            orphan_age_s=86400,
            lease_age_s=0,
            clock=clock,
        )

    @rule(which=st.integers(0, 1))
    def advance(self, which: int) -> None:
        """A subscriber goes to the head."""
        assert self._subscriber(which).once().version == len(self.versions) - 1
        assert (loaded(self.folder), (self.folder / "config.json").read_bytes()) == self.versions[-1]

    @rule(which=st.integers(0, 1))
    def restart(self, which: int) -> None:
        """A subscriber ends in good order."""
        if which in self.subscribers:
            self.subscribers.pop(which).close()

    @rule(which=st.integers(0, 1), skip=st.integers(0, 12), outage=st.booleans())
    def fail_at_the_store(self, which: int, skip: int, outage: bool) -> None:
        """The store fails a subscriber, or it dies there."""
        self.store.on("*", "*", refuse if outage else _crash, skip=skip)
        try:
            self._subscriber(which).once()
        except StorageError:
            pass
        except Crash:
            self.subscribers.pop(which).close()
        finally:
            self.store.heal()

    @rule(
        which=st.integers(0, 1),
        skip=st.integers(0, 3),
        name=st.sampled_from(["scatter", "write_durably", "move", "gather", "write_journal"]),
    )
    def die_at_the_folder(self, which: int, skip: int, name: str) -> None:
        """A subscriber dies while it changes the folder."""
        inner, left = getattr(folder_module, name), skip

        def dying(*args: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise Crash
            return inner(*args)

        setattr(folder_module, name, dying)
        try:
            self._subscriber(which).once()
        except Crash:
            self.subscribers.pop(which).close()
        finally:
            setattr(folder_module, name, inner)

    @invariant()
    def the_folder_holds_what_its_mark_says(self) -> None:
        """Or nothing that a loader would find."""
        found = loaded(self.folder) if self.folder.exists() else None
        if found is not None:
            mark = json.loads((self.folder / ".weightcast" / "state.json").read_text())
            assert (found, (self.folder / "config.json").read_bytes()) == self.versions[mark["version"]]


class TestHistories(Histories.TestCase):  # type: ignore[misc,name-defined]
    """Run by pytest."""

    settings = settings(
        max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
    )

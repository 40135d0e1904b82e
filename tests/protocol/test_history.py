"""Random histories of one stream: whatever publishers, pruning and readers do, every version is the state it says it is."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weightcast.manifest.rebuild import rebuild
from weightcast.manifest.retention import prune
from weightcast.manifest.store import StoreSettings, open_store
from weightcast.manifest.stream import StreamReader
from weightcast.publisher import Publisher, PublisherSettings
from weightcast.schemas.errors import Conflict, StorageError, WeightcastError

from ..faultstore import FaultStore, refuse
from ..versions import Bits, bits_in, copy_of

_DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.int64)
_SHAPES = ((), (0, 3), (7,), (300,), (20, 30), (70_000,))
_WRITES = ("put", "create", "put_stream")

State = dict[str, torch.Tensor]


def random_tensor(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits."""
    generator = torch.Generator().manual_seed(seed)
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, width), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


class Histories(RuleBasedStateMachine):
    """One stream; at most one publisher that should win, and others that crashed, or were taken over and live on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = open_store(f"memory://{uuid.uuid4().hex}", settings=StoreSettings(max_attempts=1))
        self.state: State = {}
        self.published: list[dict[str, Bits]] = []  # by step
        self.told: dict[int, int] = {}  # version -> step, as a publisher said
        self.versions: list[int | None] = []  # step of each version seen
        self.at: dict[int, int] = {}  # version -> step whose bits it must have
        # Tensors that are gone, which a publisher that crashed may not have committed.
        self.unsure: set[str] = set()
        self.opened: list[Publisher] = []
        self.zombies: list[Publisher] = []

    @initialize()
    def start(self) -> None:
        """A first version."""
        self.state = {
            "a": torch.zeros(300),
            "b": torch.zeros(70_000, dtype=torch.bfloat16),
            "c": torch.zeros(()),
        }
        self.open(True)
        self.publish()

    def teardown(self) -> None:
        """Threads end."""
        for publisher in self.opened:
            with suppress(WeightcastError):
                publisher.close(20)

    def open(self, fence: bool) -> None:
        """A publisher with a store of its own, which can fail for it alone."""
        self.store = FaultStore(self.inner)
        chosen = PublisherSettings(threads=2, snapshot_every=4, shard_bytes=1 << 16, row_elements=1 << 16)
        self.publisher = Publisher("", chosen, store=self.store, fence=fence)
        self.opened.append(self.publisher)

    def reader(self) -> StreamReader:
        """Of the store itself."""
        return StreamReader.open(self.inner)

    def publish(self, *, wait: bool = True, reset: bool = False, drop: tuple[str, ...] = ()) -> None:
        """The present state, under the next step."""
        self.published.append(copy_of(self.state))
        step = len(self.published) - 1
        gone = self.unsure.difference(self.state).union(drop)
        pending = self.publisher.publish(self.state, step=step, reset=reset, drop=gone)
        if wait:
            manifest = pending.wait(20)
            assert manifest.step == step
            self.unsure.clear()  # and before that the publisher remembers them
            self.told[manifest.version] = step

    @rule(seed=st.integers(0, 1 << 30), share=st.sampled_from([0.0, 0.001, 0.05, 1.0]), wait=st.booleans())
    def change(self, seed: int, share: float, wait: bool) -> None:
        """Some elements of each tensor get other bits, or none does."""
        for i, (name, tensor) in enumerate(self.state.items()):
            fresh = random_tensor(seed + i, tuple(tensor.shape), tensor.dtype)
            chosen = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)) < share
            self.state[name] = torch.where(chosen, fresh, tensor)
        self.publish(wait=wait)

    @rule(
        seed=st.integers(0, 1 << 30),
        wait=st.booleans(),
        shape=st.sampled_from(_SHAPES),
        dtype=st.sampled_from(_DTYPES),
    )
    def reshape(self, seed: int, wait: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """A tensor is added, or gets another shape or dtype."""
        self.state["abcdef"[seed % 6]] = random_tensor(seed, shape, dtype)
        self.publish(wait=wait)

    @precondition(lambda self: len(self.state) > 2)
    @rule(wait=st.booleans())
    def drop(self, wait: bool) -> None:
        """A tensor goes."""
        name = sorted(self.state)[-1]
        del self.state[name]
        self.publish(wait=wait, drop=(name,))

    @rule(tied=st.booleans())
    def tie(self, tied: bool) -> None:
        """Two names for one tensor, or no longer."""
        if "a" in self.state:
            self.state["z"] = self.state["a"] if tied else self.state["a"].clone()
            self.publish()

    @rule(reset=st.booleans())
    def again(self, reset: bool) -> None:
        """The same state, or the same state from a new start."""
        self.publish(reset=reset)

    @rule(which=st.integers(0, 1 << 30), wait=st.booleans())
    def roll_back(self, which: int, wait: bool) -> None:
        """The trainer went back to older weights, of the tensors that it still has."""
        old = self.published[which % len(self.published)]
        for name, tensor in self.state.items():
            if (
                name in old
                and (old[name].shape, len(old[name].data)) == (tuple(tensor.shape), tensor.nbytes)
                and tensor.numel()
            ):
                raw = torch.frombuffer(bytearray(old[name].data), dtype=torch.uint8)
                self.state[name] = raw.view(tensor.dtype).reshape(tensor.shape)
        self.publish(wait=wait)

    @rule(skip=st.integers(0, 6), after=st.booleans(), fence=st.booleans(), versions=st.integers(1, 2))
    def crash(self, skip: int, after: bool, fence: bool, versions: int) -> None:
        """The publisher is gone at some write; another one is started."""
        for operation in _WRITES:
            self.store.on(operation, "*", refuse, after=after, skip=skip)
        for k in range(versions):
            self.state["a"] = random_tensor(len(self.published), (300,), torch.float32)
            with suppress(StorageError):
                self.publish(wait=k == 0)
        self.store.on("*", "*", refuse)
        with suppress(StorageError):
            self.publisher.close(20)
        self.open(fence)
        self.unsure = set("abcdefz").difference(self.state)

    @rule(operation=st.sampled_from(_WRITES), after=st.booleans(), times=st.integers(1, 3))
    def stumble(self, operation: str, after: bool, times: int) -> None:
        """Some writes fail; the publisher is asked again until it is done."""
        self.store.on(operation, "*", refuse, after=after, times=times)
        self.state["a"] = random_tensor(len(self.published), (300,), torch.float32)
        for _ in range(10):
            try:
                self.publish()
                break
            except StorageError:
                continue
        else:
            raise AssertionError("the publisher did not recover from 3 failures in 10 tries")
        self.store.heal()

    @rule()
    def take_over(self) -> None:
        """Another publisher opens the stream while this one lives on."""
        self.zombies.append(self.publisher)
        self.publisher.wait_idle(20)
        self.open(True)

    @precondition(lambda self: self.zombies)
    @rule()
    def rise(self) -> None:
        """One that was taken over tries to publish."""
        zombie = self.zombies.pop()
        before = self.reader().head()
        try:
            zombie.publish(self.state, step=1 << 40, drop=list("abcdefz")).wait(20)
            raise AssertionError("it committed over its successor")
        except (Conflict, StorageError):
            assert self.reader().head() == before or self.publisher.wait_idle(20)

    @rule()
    def snapshot(self) -> None:
        """One more."""
        self.publisher.snapshot()

    @rule(keep=st.integers(1, 4))
    def prune(self, keep: int) -> None:
        """Old data goes, some days later."""
        self.publisher.wait_idle(20)
        later = lambda: self.inner.clock() + timedelta(days=2)  # noqa: E731
        prune(self.reader(), keep=keep, grace_s=0, orphan_age_s=86400, lease_age_s=0, clock=later)

    @rule(which=st.integers(0, 1 << 30))
    def read(self, which: int) -> None:
        """A reader that holds nothing reads any version that is kept."""
        reader = self.reader()
        head, floor = reader.head(), reader.floor()
        assert head is not None
        self.see()
        version = floor + which % (head + 1 - floor)
        with ThreadPoolExecutor(2) as pool:
            found = bits_in(rebuild(reader, version, pool))
        assert found == self.published[self.at[version]]

    @invariant()
    def see(self) -> None:
        """Versions are contiguous and bound to each other; steps only rise; what was told is there."""
        reader = self.reader()
        chain = reader.chain()
        steps: list[int | None] = []
        while (data := reader.manifest_bytes(len(steps))) is not None:
            manifest = (chain.extend(data) if chain.at else chain.anchor(data, 0)).manifest
            steps.append(manifest.step)
        assert steps[: len(self.versions)] == self.versions
        assert reader.listed_versions() == list(range(len(steps)))
        known = [step for step in steps if step is not None]
        assert known == sorted(set(known))
        assert all(steps[version] == step for version, step in self.told.items())
        current = 0
        for version, step in enumerate(steps):
            current = current if step is None else step
            self.at[version] = current
        self.versions = steps

    @precondition(lambda self: len(self.published) > 0)
    @rule()
    def settle(self) -> None:
        """When everything is done, the head is the last state."""
        self.publisher.wait_idle(20)
        self.publish()
        self.see()
        head = len(self.versions) - 1
        with ThreadPoolExecutor(2) as pool:
            assert bits_in(rebuild(self.reader(), head, pool)) == self.published[-1]


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=30, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)

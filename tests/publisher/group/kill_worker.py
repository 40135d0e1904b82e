"""Groups of three processes in which one dies, or sleeps, at a point of a publish: STORE OUT.

For each scenario, STORE/SCENARIO has the stream and OUT/SCENARIO-RANK.json what each rank that was left saw of the
publish in question: version or error, seconds, and what came of the next publish.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from tests.faultstore import FaultStore, die
from tests.publisher.group.kit import model, rows, stir, warm
from weightcast.manifest.store import open_store
from weightcast.publisher.group import GroupPublisher, TorchMessenger
from weightcast.schemas.errors import WeightcastError
from weightcast.schemas.settings import PublisherSettings

RANKS: Final = 3
TIMEOUT_S: Final = 3.0
SLEEP_S: Final = 7.0
VICTIM_STEP: Final = 2

SCENARIOS: Final = {
    "before-status": 2,
    "after-status": 1,
    "upload": 2,
    "before-gather": 2,
    "after-gather": 1,
    "commit-before": 0,
    "commit-after": 0,
    "zero-before-status": 0,
    "slow-status": 1,
    "slow-parts": 2,
    "slow-zero": 0,
}
"""Which rank it is that dies or sleeps."""


class Hooked(TorchMessenger):
    """Dies or sleeps when it gathers, or has gathered, under a topic."""

    before: str = ""
    after: str = ""
    sleep_s: float = 0.0

    def gather(self, topic: str, text: str) -> list[str] | None:
        if self.before and topic.startswith(self.before):
            self._act()
        found = super().gather(topic, text)
        if self.after and topic.startswith(self.after):
            self._act()
        return found

    def _act(self) -> None:
        if not self.sleep_s:
            os.kill(os.getpid(), signal.SIGKILL)
        self.before = self.after = ""
        time.sleep(self.sleep_s)


def prepare(scenario: str, messenger: Hooked, store: FaultStore) -> None:
    """Lay the trap, in the rank that is to walk into it."""
    topic = f"publish-{VICTIM_STEP + 1}"
    if scenario == "after-status":
        messenger.before = f"{topic}/parts"
        store.on("put", "data/*", die)
    elif scenario == "upload":
        store.on("put", "data/*", die, after=True)
    elif scenario == "before-gather":
        messenger.before = f"{topic}/parts"
    elif scenario == "after-gather":
        messenger.after = f"{topic}/parts"
    elif scenario.startswith("commit"):
        store.on("create", "versions/*", die, after=scenario == "commit-after")
    elif scenario.startswith("slow"):
        messenger.sleep_s = SLEEP_S
        messenger.before = f"{topic}/parts" if scenario == "slow-parts" else f"{topic}/status"
    elif scenario.endswith("before-status"):
        messenger.before = f"{topic}/status"


def rank(number: int, port: int, scenario: str, root: str, out: Path) -> None:
    """One process: two versions, the one in question, and one after it."""
    torch.set_num_threads(1)
    keys = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=keys, rank=number, world_size=RANKS)
    store = FaultStore(open_store(f"{root}/{scenario}"))
    messenger = Hooked(60)
    publisher = GroupPublisher("", messenger, PublisherSettings(threads=1), store=store)
    whole = model()
    said: dict[str, Any] = {}
    for step in range(VICTIM_STEP + 2):
        if step:
            stir(whole, step)
        if step == VICTIM_STEP:
            messenger.timeout_s = TIMEOUT_S
            if number == SCENARIOS[scenario]:
                prepare(scenario, messenger, store)
        begun = time.monotonic()
        try:
            pending = publisher.publish(rows(whole, number, RANKS), step=step)
            assert pending is not None
            outcome = pending.wait(60).version
        except WeightcastError as error:
            outcome = f"{error.kind}: {error}"
        said[str(step)] = [outcome, time.monotonic() - begun]
        if step == VICTIM_STEP and scenario.startswith("slow"):
            keys.add("through", 1)
            while int(keys.get("through")) < RANKS:  # as a training step would, all go on together
                time.sleep(0.1)
            messenger.timeout_s = 60
    (out / f"{scenario}-{number}.json").write_text(json.dumps(said))
    os._exit(0)  # a rank that is gone leaves torch's own groups hanging


def main(root: str, out: Path) -> None:
    """All scenarios at once: they wait most of the time."""
    warm()
    context = multiprocessing.get_context("fork")
    crew = []
    keys = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in SCENARIOS]
    for scenario, store in zip(SCENARIOS, keys, strict=True):
        for number in range(RANKS):
            crew.append(
                context.Process(target=rank, args=(number, store.port, scenario, root, out), daemon=True)
            )
            crew[-1].start()
    for process in crew:
        process.join()
    codes = [process.exitcode for process in crew]
    expected = {
        at * RANKS + victim
        for at, (scenario, victim) in enumerate(SCENARIOS.items())
        if not scenario.startswith("slow")
    }
    sys.exit(sum(code != (-signal.SIGKILL if at in expected else 0) for at, code in enumerate(codes)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

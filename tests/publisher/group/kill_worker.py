"""Groups of three processes in which one dies, or sleeps, at a point of a publish: STORE OUT SCENARIO...

For each scenario, STORE/SCENARIO has the stream and OUT/SCENARIO-RANK.json what each rank that was left saw of the
publish in question: version or error, seconds, and what came of the next publish.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist

from tests.faultstore import FaultStore, die
from tests.publisher.group.kit import columns, keep_stores, model, rows, stir, warm
from weightcast.manifest.store import open_store
from weightcast.publisher.group import GroupPublisher, TorchMessenger
from weightcast.schemas.errors import WeightcastError
from weightcast.schemas.settings import PublisherSettings

RANKS: Final = 3
VICTIM_STEP: Final = 2


class Scenario(NamedTuple):
    """Which rank it is that dies; or that sleeps for so long, where others wait for it for so long."""

    victim: int
    sleep_s: float = 0.0
    timeout_s: float = 3.0


SCENARIOS: Final = {
    "before-status": Scenario(2),
    "before-plan": Scenario(1),
    "before-ready": Scenario(2),
    "after-status": Scenario(1),
    "upload": Scenario(2),
    "before-gather": Scenario(2),
    "after-gather": Scenario(1),
    "commit-before": Scenario(0),
    "commit-after": Scenario(0),
    "zero-before-status": Scenario(0),
    "slow-status": Scenario(1, sleep_s=7),
    "slow-parts": Scenario(2, sleep_s=7),
    "slow-zero": Scenario(0, sleep_s=7),
}

HALF_A_MINUTE: Final = {"slow-30-status": Scenario(1, 30, 10), "slow-30-parts": Scenario(2, 30, 10)}
"""Run beside other tests, since they do nothing but wait."""

ALL: Final = SCENARIOS | HALF_A_MINUTE


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
    elif scenario in ("before-plan", "before-ready"):
        messenger.before = f"{topic}/{scenario.removeprefix('before-')}"
    elif scenario == "before-gather":
        messenger.before = f"{topic}/parts"
    elif scenario == "after-gather":
        messenger.after = f"{topic}/parts"
    elif scenario.startswith("commit"):
        store.on("create", "versions/*", die, after=scenario == "commit-after")
    elif scenario.startswith("slow"):
        messenger.sleep_s = ALL[scenario].sleep_s
        messenger.before = f"{topic}/parts" if scenario.endswith("parts") else f"{topic}/status"
    elif scenario.endswith("before-status"):
        messenger.before = f"{topic}/status"


def rank(number: int, port: int, scenario: str, root: str, out: Path) -> None:
    """One process: two versions, the one in question, and one after it."""
    faulthandler.dump_traceback_later(150, exit=True)  # a rank that hangs says where
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
            messenger.timeout_s = ALL[scenario].timeout_s
            if number == ALL[scenario].victim:
                prepare(scenario, messenger, store)
        begun = time.monotonic()
        try:
            anew = step == VICTIM_STEP and scenario in ("before-plan", "before-ready")
            divide = columns if anew else rows  # so that it must be agreed who owns what
            pending = publisher.publish(divide(whole, number, RANKS), step=step)
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


def main(root: str, out: Path, scenarios: list[str]) -> None:
    """All scenarios at once: they wait most of the time. Ends with the number of ranks that did not end as they should."""
    warm()
    context = multiprocessing.get_context("fork")
    crew = {}
    for scenario, port in zip(scenarios, keep_stores(len(scenarios)), strict=True):
        for number in range(RANKS):
            arguments = (number, port, scenario, root, out)
            crew[scenario, number] = context.Process(target=rank, args=arguments, daemon=True)
            crew[scenario, number].start()
    for process in crew.values():
        process.join()
    killed = {(name, ALL[name].victim) for name in scenarios if not ALL[name].sleep_s}
    sys.exit(
        sum(process.exitcode != (-signal.SIGKILL if who in killed else 0) for who, process in crew.items())
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])

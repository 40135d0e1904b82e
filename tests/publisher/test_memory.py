"""What a publisher takes of memory, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MIB = 1 << 20

_MEASURE = """
import json, sys, threading, time
import torch
from weightcast.publisher import Publisher, PublisherSettings

def resident(kind):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(kind))

def peak_of(work):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM starts anew
    work()
    return resident("VmHWM:")

url, case = sys.argv[1:]
torch.set_num_threads(1)
warm = Publisher(url + "-warm", PublisherSettings(threads=2))  # what the libraries take is not the publisher's
for k in range(3):
    warm.publish({"w": torch.full((70_000,), k, dtype=torch.int16).view(torch.bfloat16)}).wait()
warm.close()
found = {}
# 33 tensors of 33 MB, a size that allocators round up; scaled down to a quarter. One tensor of 256 MiB.
count, elements = {"many": (33, 33 * 1000 * 1000 // 8), "one": (1, 128 << 20)}[case]
weights = {f"w{i}": torch.zeros(elements, dtype=torch.bfloat16).fill_(i + 1) for i in range(count)}
total = sum(t.nbytes for t in weights.values())
before = resident("VmRSS:")
publisher = Publisher(url, PublisherSettings(threads=2))
found["first"] = peak_of(lambda: publisher.publish(weights).wait()) - before
for t in weights.values():
    t[::100] += 1
found["sparse"] = peak_of(lambda: publisher.publish(weights).wait()) - before
if case == "one":
    weights["w0"].view(torch.int16).bitwise_xor_(21)
    found["dense"] = peak_of(lambda: (publisher.publish(weights).wait(), publisher.wait_idle())) - before
publisher.close()
print(json.dumps({"weights": total, **found}))
"""


def measured(tmp_path: Path, case: str) -> dict[str, int]:
    """Bytes of the weights, and of each publish's peak beyond what the trainer had."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, f"file://{tmp_path}/store", case],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {k: int(v) for k, v in json.loads(done.stdout).items()}
    print({k: f"{v / MIB:.0f} MiB" for k, v in found.items()})
    return found


def test_b217_beyond_the_trainer_a_baseline_and_what_is_in_flight(tmp_path: Path) -> None:
    found = measured(tmp_path, "many")
    weights = found["weights"]
    assert weights > 250 * MIB
    # The case allows 2.25 x weights + 256 MiB with the trainer's own; the baseline is the only copy here.
    assert found["first"] <= weights + 256 * MIB
    assert found["sparse"] <= weights + 256 * MIB


def test_b218_one_huge_tensor_of_which_every_element_changes(tmp_path: Path) -> None:
    found = measured(tmp_path, "one")
    weights = found["weights"]
    assert weights == 256 * MIB
    assert found["first"] <= weights + 256 * MIB
    assert found["sparse"] <= weights + 128 * MIB
    assert found["dense"] <= 2 * weights + 256 * MIB

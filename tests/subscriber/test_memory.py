"""What a subscriber needs beyond the weights: of the order of the changes, whatever the size of the model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from weightcast.manifest.store import open_store
from weightcast.publisher import Publisher, PublisherSettings

MIB = 1 << 20
_MODEL = 1024 * MIB  # bytes
_TENSORS = 8
_VERSIONS = 3

CHILD = """
import json, sys, threading
from pathlib import Path
from weightcast.subscriber import CheckpointFolder, Subscriber, SubscriberSettings
root, into, tensors, elements = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
def anon():
    line = next(x for x in open("/proc/self/status") if x.startswith("RssAnon"))
    return int(line.split()[1]) << 10
peak, stop = 0, threading.Event()
def watch():
    global peak
    while not stop.wait(0.002):
        peak = max(peak, anon())
if into == "tensors":
    import torch
    from weightcast.subscriber import Tensors
    live = {f"w{i}": torch.ones(elements, dtype=torch.bfloat16) for i in range(tensors)}
    target = Tensors(live)
else:
    target = CheckpointFolder(into)
before = anon()
threading.Thread(target=watch, daemon=True).start()
with Subscriber(root, target, SubscriberSettings(threads=2, lease=False)) as subscriber:
    version = subscriber.once().version
stop.set()
print(json.dumps([version, peak - before]))
"""


@pytest.fixture(scope="module")
def stream() -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """A gibibyte of weights in four files, and versions that each change one element in a hundred."""
    elements = _MODEL // 2 // _TENSORS
    model = {f"w{i}": torch.zeros(elements, dtype=torch.bfloat16) for i in range(_TENSORS)}
    generator = torch.Generator().manual_seed(0)
    with TemporaryDirectory() as root:
        chosen = PublisherSettings(threads=2, snapshot_every=0, snapshot_file_bytes=_MODEL // 4 + MIB)
        with Publisher(root, chosen, store=open_store(root), fence=False) as publisher:
            publisher.publish(model).wait(60)
            for value in range(1, _VERSIONS):
                for tensor in model.values():
                    tensor[torch.randint(0, elements, (elements // 100,), generator=generator)] = value
                publisher.publish(model).wait(60)
        yield root, model


def _measure(root: str, into: str) -> int:
    command = [sys.executable, "-c", CHILD, root, into, str(_TENSORS), str(_MODEL // 2 // _TENSORS)]
    version, more = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert version == _VERSIONS - 1
    return int(more)


@pytest.mark.slow
def test_tensors_need_the_changes_beyond_themselves(stream: tuple[str, dict[str, torch.Tensor]]) -> None:
    root, model = stream
    changes = sum(t.numel() // 100 * 10 for t in model.values()) * (_VERSIONS - 1)
    more = _measure(root, "tensors")
    assert more <= 256 * MIB + changes


@pytest.mark.slow
def test_b224_a_folder_is_patched_within_little_memory(
    stream: tuple[str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    root, _ = stream
    assert _measure(root, str(tmp_path / "model")) < 512 * MIB  # anonymous, for a model of twice that
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 4

"""The Python examples of docs/ run as they stand, with a local store in place of the bucket."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from weightcast.manifest.inspect import log
from weightcast.manifest.inspect.values import LogEntry
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.subscriber import Subscriber, Tensors

DOCS: Final = Path(__file__).parents[2] / "docs"
BUCKET_ROOT: Final = "s3://bucket/runs/policy-a"
BLOCK: Final = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WITH_EXAMPLES: Final = sorted(p.name for p in DOCS.glob("*.md") if BLOCK.search(p.read_text("utf-8")))


def run(name: str, root: Path) -> dict[str, Any]:
    """Run all blocks of a document in order, in one namespace; errors name lines of the document."""
    text = (DOCS / name).read_text("utf-8")
    names: dict[str, Any] = {"__name__": "example"}
    for block in BLOCK.finditer(text):
        source = "\n" * text[: block.start(1)].count("\n") + block[1].replace(BUCKET_ROOT, str(root))
        exec(compile(source, str(DOCS / name), "exec"), names)
    return names


def versions_at(root: Path) -> list[LogEntry]:
    """All versions of a stream, oldest first."""
    return log(StreamReader.open(open_store(str(root))))[::-1]


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(name, tmp_path / "store")


def test_integrations_carry_the_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the page says of its examples holds at their end."""
    monkeypatch.chdir(tmp_path)
    names = run("integrations.md", tmp_path / "store")
    for name, tensor in names["policy"].state_dict().items():
        for copy in (names["engine"].state_dict()[name], names["weights"][name]):
            assert torch.equal(tensor.view(torch.int16), copy.view(torch.int16)), name
    versions = versions_at(tmp_path / "store")
    assert [v.step for v in versions] == [0, 1, 2, None, 3, None]  # None: another publisher took over
    assert names["mark"].version == names["position"].version == 4
    (cast,) = versions_at(tmp_path / "store-cast")
    assert (cast.kind, cast.dense_bytes) == ("snapshot", 64 * 2 + 8)
    assert [v.tensors for v in versions_at(tmp_path / "store-drop")] == [2, 1, 2]
    for stream in ("adamw", "masters"):
        assert [v.kind for v in versions_at(tmp_path / f"store-{stream}")] == ["snapshot", "delta", "delta"]
    sharded, weight = names["sharded"].state_dict(), torch.zeros(64, 64, dtype=torch.bfloat16)
    follower = {name: torch.zeros_like(tensor) for name, tensor in sharded.items()}
    for stream, tensors in (("group", follower), ("parts", {"weight": weight})):
        with Subscriber(str(tmp_path / f"store-{stream}"), Tensors(tensors)) as subscriber:
            assert subscriber.once().version == 2
    assert torch.equal(follower["bias"].view(torch.int16), sharded["bias"].view(torch.int16))
    assert torch.equal(weight.view(torch.int16), sharded["weight"].view(torch.int16))
    gate, up = (torch.zeros(16, 16, dtype=torch.bfloat16) for _ in range(2))
    with Subscriber(
        str(tmp_path / "store-fused"), Tensors({"gate.weight": gate, "up.weight": up})
    ) as follower:
        assert follower.once().version == 1
    assert torch.equal(torch.cat([gate, up]), names["fused"]["gate_up"])
    assert "tensors that are missing now: 'bias'" in capsys.readouterr().out

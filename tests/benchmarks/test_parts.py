"""Each part of the benchmark runs, quickly, in a process of its own, and what it finds can be."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from weightcast.benchmarks.part import PARTS, Options, find_part
from weightcast.benchmarks.result import Result

from ..nursery import Nursery

Run = Callable[..., Result]

FIGURES: Final = {
    "race": "races",
    "trace": "rates",
    "phases": "phases",
    "training": "sizes",
    "detectors": "detectors",
    "ranks": "ranks",
    "catchup": "catchup",
    "stores": "stores",
    "link": "links",
    "scale": "elements",
    "soak": "versions",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a part alone. Threads of one kind: those of torch wait by spinning, which a busy machine does not forgive."""
    parts = [f"weightcast.benchmarks.parts.{name}" for name in PARTS]
    one = {"OMP_NUM_THREADS": "1"}
    nursery = Nursery(*parts, "torch._dynamo", **one)  # which the first optimizer of a process imports

    def start(name: str, **options: Any) -> Result:
        folder = tmp_path_factory.mktemp(name)
        file, given = folder / "result.json", Options(quick=True, trace=folder / "trace", **options)
        environment = {**os.environ, **one}
        process = nursery.start(
            "weightcast.benchmarks.alone:main", name, given.model_dump_json(), file,
            out=folder / "out", err=folder / "err", environment=environment, folder=folder,
        )  # fmt: skip
        assert process.wait() == 0, (folder / "err").read_text()
        return checked(name, Result.model_validate_json(file.read_bytes()))

    yield start
    nursery.close()


def checked(name: str, found: Result) -> Result:
    """What holds of all parts' results."""
    assert (found.part, found.skipped) == (name, "")
    assert found.tables
    assert all(len(row) == len(table.head) for table in found.tables for row in table.rows)
    assert FIGURES[name] in found.figures
    return found


def test_every_part_has_a_module_and_a_test() -> None:
    assert set(FIGURES) == set(PARTS)
    for name in PARTS:
        part = find_part(name)
        assert callable(part.run)
        assert (part.__doc__ or "").strip()


@pytest.mark.timeout(400)  # a busy machine
def test_race(run: Run) -> None:
    """In a race all contestants are exact, or it stops; what is known of their sizes holds."""
    found = run("race", density=(0.02, 0.1))
    for race, density in zip(found.figures["races"], (0.02, 0.1), strict=True):
        assert race["density"] == pytest.approx(density, rel=0.2)
        bits = race["bits_per_change"]
        assert bits["class"] < bits["gap"] < bits["gap_xor"] < bits["xor_zstd"] < bits["index_value"]
        assert bits["copy"] == pytest.approx(16 / race["density"])
        assert (
            sum(race["planes"]["gap"].values()) < 1.05 * bits["gap"]
        )  # a packed shard of a few rows may be shorter
        assert set(race["seconds"]) == set(race["titles"])


@pytest.mark.timeout(400)  # a busy machine
def test_trace(run: Run) -> None:
    """Two steps of the really trained model."""
    (rate,) = run("trace").figures["rates"]
    assert [step["step"] for step in rate["steps"]] == [1, 2]
    for step in rate["steps"]:
        assert 0.01 < step["density"] < 0.1
        assert step["bits"]["class"] < step["bits"]["gap"] < step["bits"]["gap_xor"]
        assert step["bits"]["gap planes"] < step["bits"]["gap"]
    assert rate["race"]["elements"] == 22_713_216


@pytest.mark.timeout(400)  # a busy machine
def test_phases(run: Run) -> None:
    expected = [(0.01, "gap"), (0.01, "class"), (0.002, "gap")]
    found = run("phases", rounds=1).figures["phases"]
    for phases, (density, codec) in zip(found, expected, strict=True):
        assert phases["codec"] == codec
        assert phases["density"] == pytest.approx(density, rel=0.3)
        assert 0 < phases["stall_s"] <= phases["commit_s"]
        assert phases["wire_bytes"] < phases["mib"] * (1 << 20) / 5


@pytest.mark.timeout(400)  # a busy machine
def test_training(run: Run) -> None:
    found = run("training")
    (size,) = found.figures["sizes"]
    assert len(size["slower_percent_each"]) == 2
    expected = sorted(size["slower_percent_each"])
    assert size["slower_percent"] == pytest.approx(sum(expected) / 2)
    assert found.ratios[0].value == size["slower_percent"]


@pytest.mark.timeout(400)  # a busy machine
def test_detectors(run: Run) -> None:
    """All see the same training, so all find the same changes."""
    snapshot, *others = run("detectors").figures["detectors"]
    dense = 2 * snapshot["elements"]
    assert snapshot["elements"] == (1 << 18) + 1024
    assert snapshot["held_beyond_changes_bytes"] == dense
    assert [f["way"].split()[0] for f in others] == ["cast", "cast", "adamw", "adamw", "adamw"]
    for found in (snapshot, *others):
        assert (found["wrong"], found["whole_versions"]) == (0, 1)
        assert found["changed"] == pytest.approx(snapshot["changed"], rel=0.01)
        assert 0 < found["best_publish_s"] <= found["best_commit_s"] <= found["commit_s"]
        assert found["best_step_s"] > 0
    assert all(found["held_beyond_changes_bytes"] < dense / 100 for found in others)


@pytest.mark.timeout(400)  # a busy machine
def test_ranks(run: Run) -> None:
    """Gathering brings each rank what the others have; publishing by ranks brings none of it."""
    found = {(f["ranks"], f["way"]): f for f in run("ranks").figures["ranks"]}
    assert set(found) == {(size, way) for size in (1, 2) for way in ("own", "gather")}
    assert found[2, "gather"]["collective_bytes"] == 1 << 20  # two ranks, half of a MiB each
    for size in (1, 2):
        own, gather = found[size, "own"], found[size, "gather"]
        assert (own["collectives"], own["collective_bytes"]) == (0, 0)
        assert 0 < own["text_bytes"] < 20_000
        assert len(own["uploaded_bytes"]) == size
        assert max(own["uploaded_bytes"]) < 1.25 * sum(own["uploaded_bytes"]) / size
        assert gather["uploaded_bytes"][1:] == [0] * (size - 1)
        assert sum(own["uploaded_bytes"]) < 2 * gather["uploaded_bytes"][0]
        assert 0 < own["best_publish_s"] <= own["best_commit_s"]


@pytest.mark.timeout(400)  # a busy machine
def test_catchup(run: Run) -> None:
    """Replicas are exact, or it stops; bytes are those of the deltas and their manifests, or of the snapshot."""
    found = {f["behind"]: f for f in run("catchup").figures["catchup"]}
    assert list(found) == [1, 4, None]
    for behind, figures in found.items():
        manifests = 2000 * ((behind or 4) + 2)
        assert figures["least_bytes"] <= figures["bytes"] <= figures["least_bytes"] + manifests + 5000
    assert [found[k]["least_bytes"] for k in (1, 4)] == [found[k]["deltas_bytes"] for k in (1, 4)]
    assert found[None]["least_bytes"] == found[None]["snapshot_bytes"] == 1 << 20
    assert 0.0095 < found[1]["changed"] / (1 << 19) <= 0.01
    assert 3 * found[1]["changed"] < found[4]["changed"] < 4 * found[1]["changed"]


@pytest.mark.timeout(400)  # a busy machine
def test_stores(run: Run) -> None:
    stores = run("stores").figures["stores"]
    assert [s["store"] for s in stores] == ["local folder", "memory", "S3 on loopback"]
    assert all(value > 0 for s in stores for key, value in s.items() if key != "store")


@pytest.mark.timeout(400)  # a busy machine
def test_link(run: Run) -> None:
    """Nothing is faster than light: 60 ms there and back, 1 Gbit/s."""
    links = run("link", mib=8).figures["links"]
    assert [link["ahead"] for link in links] == [False, True]
    round_trips_s = 0.09, 0.03  # that a version takes at least after its commit
    for link, least_s in zip(links, round_trips_s, strict=True):
        assert (link["gbit_s"], link["round_trip_s"]) == (1.0, 0.06)
        assert len(link["all_s"]) == 2
        seconds = zip(link["all_s"], link["create_s"], strict=True)  # the commit is somewhere in the create
        assert min(arrived + create for arrived, create in seconds) > least_s - 0.005
        assert link["dense_gbit_s"] < 1.02
        assert min(link["plain_s"], link["plain_first_s"]) > 0.06
        assert link["bound_s"] == pytest.approx(0.12 + link["bytes"] * 8e-9)
        assert 0 < link["cores"]["subscriber"]["used_s"] < 2 * link["arrived_s"] + 1
        assert link["over_bound"] == pytest.approx(link["arrived_s"] / link["bound_s"])


@pytest.mark.timeout(400)  # a busy machine
def test_scale(run: Run) -> None:
    figures = run("scale").figures
    assert [f["elements"] for f in figures["elements"]] == [1 << 19, 1 << 20]
    assert [f["tensors"] for f in figures["tensors"]] == [10, 100]
    assert [f["subscribers"] for f in figures["subscribers"]] == [1, 2]
    assert all(0 < f["first_s"] <= f["last_s"] for f in figures["subscribers"])


@pytest.mark.timeout(400)  # a busy machine
def test_soak(run: Run) -> None:
    figures = run("soak").figures
    assert figures["versions"] == [2, 4, 6, 8, 10]
    assert list(figures["memory"]) == ["publisher", "subscriber 1"]
    for samples in figures["memory"].values():
        assert len(samples) == 5
        assert all(50 << 20 < bytes_ < 2 << 30 for bytes_ in samples)
    assert len(figures["publish_s"]) == len(figures["apply_s"]) == 10

"""The setting `codec`: which codings a publisher's deltas have, and that versions name what a reader must know."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weightcast.manifest.stream import StreamReader
from weightcast.publisher import Publisher
from weightcast.schemas import manifest as documents
from weightcast.schemas.errors import Unsupported

from ..codings import trained, weights
from ..faultstore import FaultStore, Hold
from ..versions import assert_version, chain_of, copy_of, rows_of

At = Callable[..., Publisher]


def test_by_class(store: FaultStore, publisher_at: At) -> None:
    publisher, model = publisher_at(codec="class"), weights()
    assert publisher.publish(model).wait().features == ["mix2"]
    for version in (1, 2, 3):
        model = trained(model, version)
        manifest = publisher.publish(model).wait()
        assert manifest.features == ["class", "mix2", "packed", "pairs"]
        assert {r.tensor for r in rows_of(store, manifest) if r.coding == "class"} == {"a", "b"}
        assert_version(store, version, copy_of(model))
    assert publisher.publish(model).wait().features == ["mix2"]  # nothing changed
    chain_of(store)


def test_by_gap_unless_told_otherwise(store: FaultStore, publisher: Publisher) -> None:
    publisher.publish(weights()).wait()
    manifest = publisher.publish(trained(weights(), 1)).wait()
    assert manifest.features == ["mix2", "packed", "pairs"]
    assert {r.coding for r in rows_of(store, manifest)} == {"pairs"}


def test_gap_joins_tensors_in_rows_and_class_does_not(store: FaultStore, publisher_at: At) -> None:
    publisher = publisher_at(codec="gap")
    publisher.publish(weights()).wait()
    model = trained(weights(), 1)
    (row,) = [r for r in rows_of(store, publisher.publish(model).wait()) if r.dtype == "BF16"]
    assert (row.tensor, row.tensors, row.length) == ("a", 3, 80_000 + 90_000 + 300)
    assert_version(store, 1, copy_of(model))
    publisher.close()
    by_class = publisher_at(codec="class")
    model = trained(model, 2)
    manifest = by_class.publish(model).wait()
    assert {r.tensors for r in rows_of(store, manifest) if r.coding == "class"} == {1}
    assert_version(store, manifest.version, copy_of(model))


def test_tensors_that_are_gone_at_once_have_rows_of_their_own(
    store: FaultStore, publisher: Publisher
) -> None:
    publisher.publish(weights()).wait()
    model = trained(weights(), 1)
    rows = rows_of(store, publisher.publish((n, t.clone()) for n, t in model.items()).wait())
    assert {r.tensor for r in rows if r.dtype == "BF16"} >= {"a", "b"}
    assert_version(store, 1, copy_of(model))


def test_versions_that_coalesce_are_coded_anew(store: FaultStore, publisher_at: At) -> None:
    publisher, states = publisher_at(codec="class"), [weights()]
    for seed in range(1, 4):
        states.append(trained(states[-1], seed))
    publisher.publish(states[0]).wait()
    hold = Hold()
    store.on("create", "versions/*", hold, times=1)
    publisher.publish(states[1])
    assert hold.reached.wait(10)
    publisher.publish(states[2])
    waiting = publisher.publish(states[3])
    hold.release()
    assert waiting.wait().features == ["class", "mix2", "packed", "pairs"]
    assert_version(store, 1, copy_of(states[1]))
    assert_version(store, 2, copy_of(states[3]))


def test_a_release_without_it_stops_by_name(
    store: FaultStore, publisher_at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = publisher_at(codec="class")
    publisher.publish(weights()).wait()
    publisher.publish(trained(weights(), 1)).wait()
    monkeypatch.setattr(documents, "FEATURES", frozenset({"mix2"}))
    reader = StreamReader.open(store)
    assert reader.manifest(0).features == ["mix2"]
    with pytest.raises(Unsupported, match=r"features \['class', 'packed', 'pairs'\]"):
        reader.manifest(1)

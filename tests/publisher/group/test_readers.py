"""A group's readers: how far they are, and where new ones begin."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.publisher.hooks.kit import assert_same_bits, followed
from weightcast.cli.snapshot import command as snapshot
from weightcast.manifest.store import open_store
from weightcast.schemas.errors import StorageError
from weightcast.subscriber import Subscriber, Tensors

from .kit import RANKS, Crew, agreed, columns, model, raised, stir, together


def test_every_rank_may_ask_how_far_readers_are(tmp_path: Path) -> None:
    whole, crew = model(), Crew([open_store(str(tmp_path)) for _ in range(RANKS)])
    assert [publisher.lags() for publisher in crew.publishers] == [()] * RANKS
    assert crew.publishers[1].version_of(10) is None
    engine = {name: tensor.clone().zero_() for name, tensor in whole.items()}
    with Subscriber(str(tmp_path), Tensors(engine)) as subscriber:
        for step in (10, 20):
            crew.publish(lambda r: columns(whole, r, RANKS), step=step)
            stir(whole, step)
            if step == 10:
                subscriber.once()
        assert [publisher.version for publisher in crew.publishers] == [1] * RANKS
        for publisher in crew.publishers:
            found = publisher.version_of(20)
            assert found is not None
            assert (found.version, found.manifest.step) == (1, 20)
            assert [one.lag for one in publisher.lags()] == [1]
            (late,) = publisher.wait_for(1, subscribers=1, max_lag=1, timeout=10)
            assert late.version == 0
        with pytest.raises(StorageError, match="0 of 1 subscribers came to version 1"):
            crew.publishers[2].wait_for(1, subscribers=1, timeout=0)
        waiting = [lambda p=p: p.wait_for(1, subscribers=1, timeout=30) for p in crew.publishers]
        *held, _ = together([*waiting, subscriber.once])
        assert [raised(one)[0].version for one in held] == [1] * RANKS
    crew.close()


def test_a_snapshot_taken_from_outside_is_where_new_readers_begin(tmp_path: Path) -> None:
    """Slices of columns, so that the version is told in boxes; the group goes on without noticing."""
    root = str(tmp_path)
    whole, crew = model(), Crew([open_store(root) for _ in range(RANKS)])
    for step in range(3):
        agreed(crew.publish(lambda r: columns(whole, r, RANKS), step=step))
        stir(whole, step)
    for written in (True, False):
        outcome = CliRunner().invoke(snapshot, [root, "--json"], catch_exceptions=False)
        said = json.loads(outcome.stdout)
        assert (said["version"], said["written"]) == (2, written)
    for version in (1, 2):
        shutil.rmtree(tmp_path / "data" / f"{version:012d}")  # nobody needs the deltas before it
    manifest = agreed(crew.publish(lambda r: columns(whole, r, RANKS), step=3))
    assert (manifest.version, manifest.reset) == (3, False)
    assert_same_bits(followed(root, whole), whole)
    crew.close()

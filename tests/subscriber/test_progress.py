"""When a subscriber is ready, by what is known of its target."""

from __future__ import annotations

import pytest

from weightcast.schemas.errors import StorageError
from weightcast.subscriber import progress as module
from weightcast.subscriber.progress import Progress

from ..versions import bf16
from .conftest import Trainer


@pytest.fixture
def progress(trainer: Trainer) -> Progress:
    """At version 0."""
    trainer.publish({"w": bf16(1)})
    found = Progress(None)
    found.arrived(module.Position(trainer.publish({"w": bf16(2)}), "0" * 64))
    return found


def test_a_target_that_cannot_be_had_is_not_ready_until_it_can(progress: Progress) -> None:
    assert progress.status().ready
    with pytest.raises(StorageError), progress.looking():
        raise StorageError("gone")
    assert not progress.status().ready
    with progress.looking():
        assert not progress.status().ready
    assert progress.status().ready


def test_a_look_that_takes_long_heals_and_is_not_ready_meanwhile(
    progress: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress.looking():
        assert progress.status().ready  # a short one is every poll's
        monkeypatch.setattr(module, "_LOOK_S", 0.0)
        assert not progress.status().ready
    assert progress.status().ready

"""A sidecar that is killed at any point leaves a server on exactly one version, or not ready; the next one goes on.

The points are those of one version's way: S1-S6 fetch, check, decode, stage; S7 the engine is told; S8 it has replied; S9 its caches are
reset; S10 it generates again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from weightcast.schemas.errors import Conflict

from .conftest import Live, Spec

INSIDE = {
    "S7": ("write", "sleep"),
    "S8": ("write", "after"),
    "S9": ("reset", "sleep"),
    "S10": ("resume", "sleep"),
}
"""Where the server is held while its sidecar is killed."""


@pytest.fixture(scope="module")
def live(serve: Callable[..., Live]) -> Live:
    """A dense model, on whichever version it is."""
    return serve(Spec("dense"))


def check_whole(live: Live) -> None:
    """The newest version, everywhere, proved by a full reading."""
    live.server.wait_held(live.feed.head)
    report = live.server.verify()
    assert (report.good, report.faults) == (True, [])


@pytest.mark.parametrize("point", INSIDE)
def test_b109_killed_while_the_engine_is_paused(live: Live, point: str) -> None:
    """The server ends the run by itself, or stays paused until the next sidecar; never does it serve a mix."""
    where, action = INSIDE[point]
    with live.sidecar() as sidecar:
        live.server.wait_held(live.feed.head)
        live.server.arm(where, "any", action, seconds=3)
        live.feed.reveal(live.feed.head + 1)
        live.server.wait_struck(where)
        sidecar.kill()
    with live.sidecar():
        check_whole(live)
    live.assert_fresh(live.feed.head)


@pytest.mark.parametrize("delay_s", [0.05, 0.2, 0.4])
def test_killed_before_the_engine_is_told(live: Live, delay_s: float) -> None:
    """S1-S6, and whatever else happens that long after a version appears."""
    with live.sidecar() as sidecar:
        live.server.wait_held(live.feed.head)
        live.feed.reveal(live.feed.head + 1)
        time.sleep(delay_s)
        sidecar.kill()
    state = live.server.state()
    assert state.held is not None or state.paused
    with live.sidecar():
        check_whole(live)


def test_b196_of_two_sidecars_one_goes_on_and_nothing_is_mixed(live: Live) -> None:
    """The one that came last has taken the server over; the other ends with a conflict as soon as it notices."""
    with live.sidecar() as first:
        live.server.wait_held(live.feed.head)
        with live.sidecar() as second:
            live.feed.reveal(live.feed.head + 1)
            check_whole(live)
            codes = [sidecar.process.poll() for sidecar in (first, second)]
            assert None in codes
            assert set(codes) <= {None, Conflict.exit_code}

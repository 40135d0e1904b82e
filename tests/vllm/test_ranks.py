"""One rank of two fails or dies: the server ends on one version on both, or does not serve."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from .conftest import Live, Spec
from .server import wait_for


@pytest.fixture(scope="module")
def live(serve: Callable[..., Live]) -> Live:
    """A dense model on two ranks, on whichever version it is."""
    return serve(Spec("dense", ranks=2))


@pytest.fixture(autouse=True)
def no_faults_left(live: Live) -> Iterator[None]:
    """A test that fails does not hand its faults to the next one."""
    yield
    live.server.disarm()


@pytest.mark.parametrize("action", ["fail", "torn"])
def test_a_rank_that_fails_once_is_healed_by_the_same_values(live: Live, action: str) -> None:
    """Before its first byte, or half way; the other rank has written."""
    with live.sidecar() as sidecar:
        live.server.wait_held(live.feed.head)
        live.server.arm("write", "tp1", action)
        live.feed.reveal(live.feed.head + 1)
        live.server.wait_struck("write")
        sidecar.wait_applied(live.feed.head)
        live.server.wait_held(live.feed.head)
        live.assert_fresh(live.feed.head)
        assert live.server.verify().good


def test_b187_a_rank_that_keeps_failing_leaves_the_engine_paused_and_not_ready(live: Live) -> None:
    """Nobody is answered from mixed weights; who asked waits, and is answered once it is healed."""
    server, answers = live.server, []
    with live.sidecar() as sidecar:
        server.wait_held(live.feed.head)
        wait_for(sidecar.ready, 30, "readiness")
        server.arm("write", "tp1", "torn", times=100)
        server.arm("load", "tp1", "fail", times=100)  # neither the same values nor a snapshot helps
        live.feed.reveal(live.feed.head + 1)
        server.wait_struck("write")
        wait_for(lambda: not sidecar.ready(), 30, "a sidecar that is not ready")
        wait_for(lambda: server.state().paused, 30, "a pause")  # it may just be in a shorter one
        asked = threading.Thread(target=lambda: answers.append(server.probe()))
        asked.start()
        asked.join(3)
        state = server.state()
        assert (state.paused, state.held, answers) == (True, None, [])
        server.disarm()
        sidecar.wait_applied(live.feed.head, timeout_s=120)
        asked.join(60)
        assert len(answers) == 1  # nobody was refused
        live.assert_fresh(live.feed.head)
        assert server.verify().good
        wait_for(sidecar.ready, 30, "readiness")


def test_b193_a_killed_rank_ends_the_server_and_a_restarted_one_is_brought_to_the_head(live: Live) -> None:
    """The restarted server begins with version 0; the sidecar, which ran on, notices and loads the head."""
    server = live.server
    with live.sidecar() as sidecar:
        server.wait_held(live.feed.head)
        server.arm("write", "tp1", "kill")
        live.feed.reveal(live.feed.head + 1)
        server.wait_struck("write")
        wait_for(lambda: not server.healthy(), 60, "the end of the server")
        wait_for(lambda: not sidecar.ready(), 60, "a sidecar that is not ready")
        server.restart()
        server.wait_held(live.feed.head, timeout_s=120)
        live.assert_fresh(live.feed.head)
        assert sidecar.process.poll() is None

"""A server under load, on a machine that does nothing else: pauses, requests in flight, caches, exact bits."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

import pytest

from .conftest import Live, Spec
from .models import SPECIAL, SPECIAL_TENSOR, VERSIONS
from .reference import PROMPTS
from .server import Load

pytestmark = pytest.mark.alone

WIDTH = 30


@pytest.fixture(scope="module")
def live(serve: Callable[..., Live]) -> Live:
    """A dense model on version 0. Its development routes are there for `peek` alone."""
    return serve(Spec("dense"), more={"VLLM_SERVER_DEV_MODE": "1"})


def advance(live: Live, versions: int, *options: str) -> tuple[Load, list[float]]:
    """Apply versions under load, and say how long the engine was paused for each."""
    pauses = []
    with live.sidecar(*options) as sidecar:
        live.server.wait_held(live.feed.head)
        with Load(live.server, WIDTH) as load:
            time.sleep(2)
            for _ in range(versions):
                live.feed.reveal(live.feed.head + 1)
                pauses.append(sidecar.wait_applied(live.feed.head)["paused_s"])
                time.sleep(0.3)
    assert load.done >= WIDTH
    return load, pauses


def test_keep_fails_no_request_and_pauses_for_milliseconds(live: Live) -> None:
    """30 requests in flight over 20 versions. docs/benchmarks.md keeps the pauses that this prints."""
    load, pauses = advance(live, 20)
    p99 = sorted(pauses)[math.ceil(len(pauses) * 0.99) - 1]
    print(f"{load.done} requests, pauses: median {sorted(pauses)[10] * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms")
    assert load.errors == []


def test_wait_fails_no_request_either(live: Live) -> None:
    """They end first, on the weights that they began with."""
    load, pauses = advance(live, 3, "--pause", "wait")
    print(f"{load.done} requests, pauses with their drain: {[round(p, 2) for p in pauses]} s")
    assert load.errors == []


def hits(live: Live) -> float:
    """Tokens that the prefix cache answered so far."""
    text = str(live.server.ask("GET", "/metrics")[1])
    return sum(
        float(value) for value in re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", text, re.M)
    )


def test_a_stale_prefix_cache_does_not_survive_an_update(live: Live) -> None:
    """A long prompt that is cached before, and held by a request in flight during the update."""
    long = [PROMPTS[3]]
    with live.sidecar() as sidecar:
        live.server.wait_held(live.feed.head)
        before, cached = live.server.probe(prompts=long), hits(live)
        assert live.server.probe(prompts=long) == before
        assert hits(live) >= cached + 32  # or this test would show nothing
        with Load(live.server, 2, tokens=200, prompt=PROMPTS[3]):
            time.sleep(0.3)
            live.feed.reveal(live.feed.head + 1)
            sidecar.wait_applied(live.feed.head)
            after = live.server.probe(prompts=long)
    assert after != before
    answers = live.probe()
    assert after == answers[0][3:]
    live.assert_fresh(live.feed.head, answers)


def test_nan_payloads_and_negative_zero_reach_the_live_weights(live: Live) -> None:
    """The last version of this stream: bit patterns that a float comparison or a conversion would lose."""
    live.feed.reveal(VERSIONS["dense"] + 1)
    with live.sidecar() as sidecar:
        sidecar.wait_applied(live.feed.head)
    body = {"method": "testing_peek", "args": [SPECIAL_TENSOR, len(SPECIAL)]}
    status, answer = live.server.ask("POST", "/collective_rpc", body)
    assert (status, answer["results"]) == (200, [list(SPECIAL)])
    assert live.server.verify().good

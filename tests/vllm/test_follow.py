"""Versions of a training run, applied to live servers: each answers as a server that was started on that version."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .conftest import Live, Spec

VERSIONS = 5

SPECS = [
    Spec("dense"),
    Spec("tied"),
    Spec("moe"),
    Spec("dense", ranks=2),
    Spec("moe", ranks=2, experts=True),
    Spec("dense", replicas=2),
]


@pytest.fixture(scope="module", params=[pytest.param(spec, id=spec.name) for spec in SPECS])
def live(request: pytest.FixtureRequest, serve: Callable[..., Live]) -> Live:
    """A server on version 0, of each kind."""
    return serve(request.param)


def test_versions_equal_fresh_engines_bit_for_bit(live: Live) -> None:
    """Tokens and log-probabilities of every replica, after each of five versions of a real AdamW run.

    With two ranks a fresh engine costs too much for each version: 1, 3 and 5 have one, and all are proved by a full
    reading of the live weights against the manifest's digest.
    """
    seen = [live.probe()]
    with live.sidecar() as sidecar:
        for version in range(1, VERSIONS + 1):
            live.feed.reveal(version)
            applied = sidecar.wait_applied(version)
            answers = live.probe()
            assert answers not in seen  # or a stale server would pass as well
            seen.append(answers)
            report = live.server.verify()
            assert (report.good, report.digest) == (True, applied["digest"])
            if live.spec.ranks == 1 or version % 2:
                live.assert_fresh(version, answers)
            print(f"{live.spec.name} version {version}: paused {applied['paused_s'] * 1e3:.1f} ms")


def test_every_rank_reports_the_version_and_the_digest_holds(live: Live) -> None:
    """DP replicas and TP ranks, each by name; a full reading of the weights proves it."""
    live.server.wait_held(VERSIONS)
    state, report = live.server.state(), live.server.verify()
    names = {
        f"dp{replica}-pp0-tp{rank}"
        for replica in range(live.spec.replicas)
        for rank in range(live.spec.ranks)
    }
    assert {row.rank for row in state.ranks} == names
    assert state.weight_version == str(VERSIONS)
    assert (report.good, report.faults) == (True, [])
    assert report.held is not None
    assert report.held.digest == report.digest

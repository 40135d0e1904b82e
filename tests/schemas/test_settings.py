"""Settings: flags over environment over file over defaults; unknown keys are errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightcast.schemas.errors import NotFound, UsageError
from weightcast.schemas.settings import PublisherSettings, SubscriberSettings, load


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [n for n in os.environ if n.startswith("WEIGHTCAST_")]:
        monkeypatch.delenv(name)


def test_order_of_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "weightcast.toml"
    config.write_text(
        "[publisher]\nsnapshot_every = 7\nlevel = 3\nwriter = 'file'\n[subscriber]\npoll_s = 2\n"
    )
    assert load(PublisherSettings, {}).snapshot_every == 100
    assert load(PublisherSettings, {}, config).snapshot_every == 7
    monkeypatch.setenv("WEIGHTCAST_PUBLISHER_SNAPSHOT_EVERY", "8")
    monkeypatch.setenv("WEIGHTCAST_PUBLISHER_LEVEL", "4")
    assert load(PublisherSettings, {}, config).snapshot_every == 8
    found = load(PublisherSettings, {"snapshot_every": 9, "level": None}, config)
    assert (found.snapshot_every, found.level, found.writer) == (9, 4, "file")
    monkeypatch.setenv("WEIGHTCAST_CONFIG", str(config))
    assert load(SubscriberSettings, {}).poll_s == 2


def test_unknown_keys_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "weightcast.toml"
    for text, match in (
        ("[publisher]\nlevle = 3\n", "levle"),
        ("[publishr]\n", "publishr"),
        ("level = ", "weightcast.toml"),
    ):
        config.write_text(text)
        with pytest.raises(UsageError, match=match):
            load(PublisherSettings, {}, config)
    monkeypatch.setenv("WEIGHTCAST_SUBSCRIBER_POL_S", "1")
    with pytest.raises(UsageError, match="WEIGHTCAST_SUBSCRIBER_POL_S"):
        load(SubscriberSettings, {})
    with pytest.raises(NotFound, match=r"none\.toml"):
        load(PublisherSettings, {}, tmp_path / "none.toml")


def test_values_out_of_bounds_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"publisher setting level: .* found 0"):
        load(PublisherSettings, {"level": 0})
    monkeypatch.setenv("WEIGHTCAST_PUBLISHER_THREADS", "many")
    with pytest.raises(UsageError, match=r"publisher setting threads: .*'many'"):
        load(PublisherSettings, {})

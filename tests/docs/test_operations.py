"""The tables of docs/operations.md against the code: settings, metrics, exit codes."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final

import pytest
from annotated_types import Ge, Gt, Le
from prometheus_client import CollectorRegistry
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from weightcast.cli import ending
from weightcast.cli.options import _STORE_OPTIONS, StoreOptions, store_options
from weightcast.cli.sidecar_metrics import PublisherMetrics
from weightcast.cli.sidecar_subscribe import SubscriberMetrics
from weightcast.manifest.store import StoreSettings
from weightcast.schemas import errors
from weightcast.schemas.settings import PublisherSettings, SubscriberSettings
from weightcast.subscriber import CheckpointFolder, Subscriber

from .test_format import rows

DOCS: Final = Path(__file__).parents[2] / "docs"
TEXT: Final = (DOCS / "operations.md").read_text("utf-8")


def written(name: str, value: Any) -> str:
    """A value of a setting as the tables write it."""
    if value is None or value == {}:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if name.endswith("_bytes"):
        return f"{value >> 20} MiB" if value >= 1 << 20 else f"{value >> 10} KiB"
    return (
        f"`{value}`" if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
    )


def bounds(name: str, field: FieldInfo) -> str:
    """The bounds of a number as the tables write them."""
    low = next((m.ge for m in field.metadata if isinstance(m, Ge)), None)
    above = next((m.gt for m in field.metadata if isinstance(m, Gt)), None)
    high = next((m.le for m in field.metadata if isinstance(m, Le)), None)
    if low is not None:
        return (
            f"{written(name, low)} to {written(name, high)}"
            if high is not None
            else f"at least {written(name, low)}"
        )
    if above is not None:
        return f"above {above}" + (f", at most {high}" if high is not None else "")
    return ""


@pytest.mark.parametrize("model", [PublisherSettings, SubscriberSettings])
def test_settings(model: type[PublisherSettings] | type[SubscriberSettings]) -> None:
    prefix = str(model.model_config["env_prefix"])
    documented = {row[0].strip("`"): row[1:] for row in rows(TEXT) if row[0].startswith(f"`{prefix}")}
    assert list(documented) == [prefix + name.upper() for name in model.model_fields]
    for name, field in model.model_fields.items():
        default, limits, meaning = documented[prefix + name.upper()]
        shown = "CPUs, at most 8" if field.default is PydanticUndefined else written(name, field.default)
        assert default == shown, name
        assert name == "writer" or limits == bounds(name, field), name
        assert meaning, name


def test_settings_named_in_prose_exist() -> None:
    known = {
        str(model.model_config["env_prefix"]) + name.upper()
        for model in (PublisherSettings, SubscriberSettings)
        for name in model.model_fields
    }
    for path in [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]:
        named = re.findall(r"WEIGHTCAST_(?:PUBLISHER|SUBSCRIBER)_[A-Z_]*[A-Z]", path.read_text("utf-8"))
        assert set(named) <= known, path


def test_store_settings() -> None:
    documented = {
        row[0].strip("`"): row[1:] for row in rows(TEXT) if len(row) == 5 and row[0].startswith("`")
    }
    known = {f.name: f for f in fields(StoreSettings)}
    assert list(documented) == list(known)
    options = {f.name for f in fields(StoreOptions)}
    assert len(_STORE_OPTIONS) == len(options) + 1  # and --debug

    @store_options
    def command(**_: Any) -> None:
        """Takes the store's options."""

    flags = {p.name: p.opts[0] for p in command.__click_params__}  # type: ignore[attr-defined]
    for name, field in known.items():
        option, _, default, _ = documented[name]
        value = field.default if field.default is not MISSING else {}
        assert default == written(name, value), name
        if name in options:
            assert option == f"`{flags[name]}`", name
        else:
            assert option in ("", "`--single-writer` (`publish`)"), name


def exposed(registry: CollectorRegistry) -> dict[str, str]:
    """Names of metrics as Prometheus sees them, and their types."""
    return {f"{m.name}_total" if m.type == "counter" else m.name: m.type for m in registry.collect()}


def test_metrics(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    PublisherMetrics(registry)
    with Subscriber(str(tmp_path / "store"), CheckpointFolder(tmp_path / "model")) as subscriber:
        SubscriberMetrics(registry, subscriber)
        found = exposed(registry)
    table = [row for row in rows(TEXT) if re.match(r"`weightcast_\w+`$", row[0])]
    assert {row[0].strip("`"): row[1] for row in table} == found
    assert len(table) == len(found) > 15


def test_metrics_named_in_prose_exist() -> None:
    table = {row[0].strip("`") for row in rows(TEXT) if row[0].startswith("`weightcast_")}
    assert set(re.findall(r"\bweightcast_(?:publisher|subscriber)_\w+", TEXT)) == table


@pytest.mark.parametrize("document", ["operations.md", "cli.md"])
def test_exit_codes(document: str) -> None:
    table = [r for r in rows((DOCS / document).read_text("utf-8")) if re.fullmatch(r"\d+", r[0])]
    found = {int(row[0]): re.findall(r"`(\w+)`", row[1]) for row in table}
    expected: dict[int, list[str]] = {0: [], ending.INTERRUPTED: [], ending.TERMINATED: []}
    expected[ending.OutputClosed.code] = []
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, errors.WeightcastError):
            expected.setdefault(value.exit_code, []).append(value.kind)
    assert found == expected

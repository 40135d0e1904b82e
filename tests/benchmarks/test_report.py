"""Results as text: tables, bars, spreads, the document's sections, and pictures."""

from __future__ import annotations

import json
import re
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from weightcast.benchmarks import __main__ as program
from weightcast.benchmarks.part import PARTS, Options
from weightcast.benchmarks.plot import HEIGHT, WIDTH, Axis, draw, label
from weightcast.benchmarks.report import number, part_section, ratio_table
from weightcast.benchmarks.result import Line, Plot, Ratio, Result, Table
from weightcast.benchmarks.sections import marks, replaced, update
from weightcast.schemas.errors import NotFound, UsageError

ROOT = Path(__file__).parents[2]
PLOT = Plot(
    name="p", title="a < b", x="elements", y="s", log_x=True,
    lines=[Line(label="one", x=[1, 10, 100], y=[1, 2, 4]), Line(label="two", x=[1, 100], y=[0, 3])],
)  # fmt: skip


def result(value: float = 2.0, **changes: object) -> Result:
    ratios = [
        Ratio(name="fast", value=value, bar=1.5),
        Ratio(name="small", value=value, bar=1.5, at_most=True, unit="MiB"),
        Ratio(name="free", value=value),
    ]
    table = Table(title="T", head=["a", "b"], rows=[["1", "2"]], note="N.")
    return Result(part="race", tables=[table], plots=[PLOT], ratios=ratios, seconds=3).model_copy(
        update=changes
    )


def rows(text: str) -> list[list[str]]:
    return [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (0.5, "0.50"),
        (3.14159, "3.14"),
        (42.42, "42.4"),
        (12345.6, "12,346"),
        (-7, "-7.00"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_a_bar_is_reached_from_its_own_side() -> None:
    assert [row[-1] for row in rows(ratio_table([result()]))[1:]] == ["yes", "no", ""]
    assert [row[-1] for row in rows(ratio_table([result(1.0)]))[1:]] == ["no", "yes", ""]
    assert rows(ratio_table([result()]))[1] == ["fast", "2.00 ×", "≥ 1.50 ×", "yes"]
    assert rows(ratio_table([result()]))[2] == ["small", "2.00 MiB", "≤ 1.50 MiB", "no"]


def test_of_several_runs_the_median_counts() -> None:
    table = rows(ratio_table([result(v) for v in (9.0, 1.0, 2.0)]))
    assert table[0] == ["ratio", "here", "spread", "bar", "reached"]
    assert table[1] == ["fast", "2.00 ×", "1.00–9.00", "≥ 1.50 ×", "yes"]


def test_a_section_has_the_last_tables_and_links_to_plots() -> None:
    text = part_section([result()], plots=True)
    assert "**T**\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nN.\n" in text
    assert "![a < b](plots/p.svg)" in text
    assert "plots/" not in part_section([result()])
    assert "was skipped: no root" in part_section([result(skipped="no root")])


def test_only_what_is_between_marks_is_replaced() -> None:
    begin, end = marks("race")
    text = f"before\n{begin}\nold\n{end}\nafter {end[:4]}\n"
    assert replaced(text, {"race": "new \\1\n"}) == f"before\n{begin}\n\nnew \\1\n\n{end}\nafter {end[:4]}\n"
    with pytest.raises(UsageError, match="section race"):
        replaced("nothing", {"race": "new"})


def test_an_update_writes_all_or_nothing(tmp_path: Path) -> None:
    document = tmp_path / "d.md"
    with pytest.raises(NotFound):
        update(document, {"race": "new"}, [PLOT])
    document.write_text("no marks")
    with pytest.raises(UsageError):
        update(document, {"race": "new"}, [PLOT])
    assert document.read_text() == "no marks"
    assert not (tmp_path / "plots").exists()
    document.write_text("{}\n{}\n".format(*marks("race")))
    update(document, {"race": "new"}, [PLOT])
    assert "\nnew\n" in document.read_text()
    assert (tmp_path / "plots" / "p.svg").read_text() == draw(PLOT)


def test_axes() -> None:
    linear = Axis([2.0, 10.0], (0.0, 100.0), log=False)
    assert (linear.at(0), linear.at(5), linear.at(10)) == (0, 50, 100)
    assert linear.ticks() == [0, 2, 4, 6, 8, 10]
    log = Axis([0.02, 5.0], (100.0, 0.0), log=True)
    assert log.ticks() == [0.01, 0.1, 1, 10]
    assert log.at(0.01) == 100
    assert log.at(1) == pytest.approx(100 / 3)
    assert [label(v) for v in (0, 0.5, 2000, 1e4, 1e-4, 2.5e6)] == [
        "0",
        "0.5",
        "2000",
        "1e4",
        "1e-4",
        "2.5e6",
    ]


def test_a_plot_is_an_svg_with_its_points_inside() -> None:
    root = ET.fromstring(draw(PLOT))
    space = {"s": "http://www.w3.org/2000/svg"}
    texts = [t.text for t in root.iterfind(".//s:text", space)]
    assert {"a < b", "elements", "s", "one", "two", "10"} <= set(texts)
    lines = [line.attrib["points"].split() for line in root.iterfind(".//s:polyline", space)]
    assert [len(points) for points in lines] == [3, 2]
    points = [tuple(map(float, p.split(","))) for line in lines for p in line]
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in points)
    assert points[0][0] == points[3][0] < points[1][0] < points[2][0] == points[4][0]
    assert points[2][1] < points[1][1] < points[0][1] < points[3][1]  # up is less


def test_the_program_runs_parts_and_keeps_what_they_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, Options]] = []

    def alone(name: str, options: Options) -> Result:
        ran.append((name, options))
        return result(float(len(ran)), part=name)

    monkeypatch.setattr(program, "alone", alone)
    document, figures = tmp_path / "d.md", tmp_path / "out" / "f.json"
    document.write_text("{}\n{}\n".format(*marks("soak")) + "{}\n{}\n".format(*marks("race")))
    arguments = ["soak", "race", "--repeat", "2", "--quick", "--json", str(figures), "--docs", str(document)]
    assert program.main(arguments) == 0
    assert [name for name, _ in ran] == ["race", "race", "soak", "soak"]
    assert all(options.quick for _, options in ran)
    kept = json.loads(figures.read_text())["parts"]
    assert [r["ratios"][0]["value"] for r in kept["soak"]] == [3, 4]
    assert "3.50 ×" in document.read_text()
    assert "## soak" in capsys.readouterr().out
    document.write_text("no marks")
    assert program.main(["race", "--docs", str(document)]) == 2
    with pytest.raises(SystemExit):
        program.main(["racing"])
    assert len(ran) == 5


def test_a_part_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def alone(name: str, options: Options) -> Result:
        if name == "race":
            raise subprocess.CalledProcessError(3, "race")
        return result(part=name)

    monkeypatch.setattr(program, "alone", alone)
    document = tmp_path / "d.md"
    document.write_text("{}\n{}\n".format(*marks("soak")) + "{}\nold\n{}\n".format(*marks("race")))
    assert program.main(["soak", "race", "--docs", str(document)]) == 1
    shown = capsys.readouterr()
    assert "race failed (3)" in shown.err
    assert "## soak" in shown.out
    assert "\nold\n" in document.read_text()
    assert "**T**" in document.read_text()


def test_the_document_has_a_place_for_each_part_and_shows_every_plot() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")
    for name in PARTS:
        assert all(text.count(mark) == 1 for mark in marks(name)), name
    shown = set(re.findall(r"\]\(plots/([\w-]+)\.svg\)", text))
    assert shown == {path.stem for path in (ROOT / "docs" / "plots").glob("*.svg")}

"""Measured figures as Markdown tables. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .race import CONTESTANTS


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


def race_table(races: Sequence[dict[str, Any]]) -> str:
    """The codec and its yardsticks: speed as a share of the scan, and bits on the wire for each change."""
    parts = []
    for race in races:
        seconds, bits = race["seconds"], race["bits_per_change"]
        read = 2 * race["mib"] * (1 << 20)
        rows = [
            [
                title,
                f"{1e3 * seconds[name]:.1f}",
                f"{read / seconds[name] / 1e9:.1f}",
                f"{100 * seconds['scan'] / seconds[name]:.0f} %",
                f"{seconds['xor_zstd'] / seconds[name]:.1f} ×",
                f"{bits[name]:.2f}" if name in bits else "",
            ]
            for name, title in CONTESTANTS.items()
        ]
        parts.append(
            f"### {race['mib']} MiB of bf16, {100 * race['density']:.2f} % changed, {race['threads']} threads\n"
        )
        parts.append(
            table(
                ["what", "ms", "GB/s of both arrays", "of scan", "against XOR + zstd-1", "bits a change"],
                rows,
            )
        )
        parts.append(
            "Planes: " + ", ".join(f"{n} {b:.2f}" for n, b in race["planes"].items()) + " bits a change.\n"
        )
    return "\n".join(parts)


def phases_table(phases: Sequence[dict[str, float]]) -> str:
    """A publish and an apply, phase by phase."""
    rows = [
        [
            f"{100 * p['density']:.2f} %",
            f"{1e3 * p['stall_s']:.0f}",
            f"{p['stall_over_copy']:.2f} ×",
            f"{1e3 * p['commit_s']:.0f}",
            f"{1e3 * p['apply_s']:.0f}",
            f"{p['bits_per_change']:.2f}",
            f"{p['dense_over_wire']:.0f} ×",
            f"{p['publish_extra_mib']:.0f}",
            f"{p['apply_extra_mib']:.0f}",
        ]
        for p in phases
    ]
    head = [
        "changed",
        "stall of the publishing thread, ms",
        "stall against a plain copy",
        "publish to commit, ms",
        "apply, ms",
        "bits a change on the wire",
        "less than dense",
        "publisher's memory beyond the baseline, MiB",
        "subscriber's beyond the tensors, MiB",
    ]
    return f"### Publish and apply through a local store, {phases[0]['mib']:.0f} MiB of bf16\n\n{table(head, rows)}"


def counts_table(counts: Sequence[dict[str, float]]) -> str:
    """The same bytes in few and in many tensors."""
    few = counts[0]
    rows = [
        [
            f"{c['tensors']:,}",
            *(f"{1e3 * c[f'{phase}_s']:.0f}" for phase in ("publish", "tensors", "folder")),
            f"{c['publish_s'] + c['tensors_s'] - few['publish_s'] - few['tensors_s']:.2f}",
            f"{c['manifest_bytes']:,}",
            f"{c['wire_bytes']:,}",
        ]
        for c in counts
    ]
    head = [
        "tensors",
        "publish, ms",
        "apply to tensors, ms",
        "apply to a folder, ms",
        "publish + apply beyond the first row, s",
        "manifest, bytes",
        "shards, bytes",
    ]
    return f"### 6.4 million bf16 elements, 1 % changed\n\n{table(head, rows)}"

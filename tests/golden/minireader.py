"""A reader of format 1, written from docs/format.md alone: it proves that the document says enough.

Slow on purpose: plain integers, one element at a time. Nothing of the package is imported.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import zstandard

WIDTHS = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"], 1),
    **dict.fromkeys(["U16", "I16", "F16", "BF16"], 2),
    **dict.fromkeys(["U32", "I32", "F32"], 4),
    **dict.fromkeys(["U64", "I64", "F64", "C64"], 8),
}
MASK = (1 << 64) - 1
FRAME = bytes.fromhex("28b52ffd")


@dataclass(frozen=True)
class Spec:
    """A row of the layout."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    tied_to: str | None
    mix: int

    @property
    def elements(self) -> int:
        count = 1
        for d in self.shape:
            count *= d
        return count


@dataclass
class Model:
    """A version: its manifest and the bits of its untied tensors."""

    manifest: dict[str, Any]
    sha256: str
    layout: list[Spec]
    bits: dict[str, list[int]]

    def tensor(self, name: str) -> bytes:
        """Bytes of a tensor, tied or not."""
        spec = next(s for s in self.layout if s.name == name)
        return b"".join(v.to_bytes(WIDTHS[spec.dtype], "little") for v in self.bits[spec.tied_to or name])


def check(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


class MiniReader:
    """Reads one stream in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stream = json.loads((root / "stream.json").read_bytes())
        check(
            self.stream["kind"] == "stream" and self.stream["format"] == 1 and self.stream["features"] == [],
            "stream",
        )

    def read(self, version: int, parent: Model | None) -> Model:
        """The version, from its parent or, where it is a reset, from its snapshot."""
        data = (self.root / f"versions/{version:012d}.json").read_bytes()
        manifest = json.loads(data)
        check(
            manifest["kind"] == "version"
            and manifest["format"] == 1
            and set(manifest["features"]) <= {"boxes", "class", "mix2", "packed", "pairs"},
            "format",
        )
        check(
            manifest["stream"] == self.stream["stream"] and manifest["version"] == version,
            "stream or version",
        )
        if version > 0:
            assert parent is not None
            check(manifest["parent"] == {"version": version - 1, "sha256": parent.sha256}, "parent")
            check(manifest["digest_before"] == parent.manifest["digest_after"], "digest before")
        layout = self.layout(manifest["layout"])
        mixes = {spec.mix for spec in layout}
        check(mixes <= {2 if "mix2" in manifest["features"] else 1}, "feature")
        if manifest["reset"]:
            ref = manifest["snapshot"]
            bits = self.snapshot(self.object(ref["key"], ref), ref["key"].rpartition("/")[0])
        else:
            assert parent is not None
            bits = self.delta(manifest, layout, parent)
        model = Model(manifest, hashlib.sha256(data).hexdigest(), layout, bits)
        check(total(layout, bits) == manifest["digest_after"], f"digest after of version {version}")
        return model

    def object(self, key: str, ref: dict[str, Any]) -> bytes:
        """An object, checked by size and hash."""
        data = (self.root / key).read_bytes()
        check(len(data) == ref["size"] and hashlib.sha256(data).hexdigest() == ref["sha256"], key)
        return data

    def layout(self, ref: dict[str, Any]) -> list[Spec]:
        """The tensor table."""
        data = self.object(f"layouts/{ref['sha256']}.arrow", ref)
        mix = int((pa.ipc.open_file(pa.BufferReader(data)).schema.metadata or {}).get(b"mix", b"1"))
        check(mix in (1, 2), f"mix {mix}")
        specs = [Spec(r["name"], r["dtype"], tuple(r["shape"]), r["tied_to"], mix) for r in table(data)]
        check(len(specs) == ref["tensors"], "number of tensors")
        check(specs == sorted(specs, key=lambda s: (s.dtype, s.name)), "order")
        return specs

    def snapshot(self, data: bytes, folder: str) -> dict[str, list[int]]:
        """All tensors of a snapshot: a plain checkpoint."""
        manifest = json.loads(data)
        index = json.loads((self.root / folder / "model.safetensors.index.json").read_bytes())
        found: dict[str, list[int]] = {}
        for file in manifest["weights"]:
            content = self.object(f"{folder}/{file['name']}", file)
            length = int.from_bytes(content[:8], "little")
            header = json.loads(content[8 : 8 + length])
            for name, item in header.items():
                if name != "__metadata__":
                    begin, end = (8 + length + n for n in item["data_offsets"])
                    found[name] = numbers(content[begin:end], WIDTHS[item["dtype"]])
                    check(index["weight_map"][name] == file["name"], "index")
        for file in manifest["files"]:
            self.object(f"{folder}/{file['name']}", file)
        return found

    def companions(self, manifest: dict[str, Any]) -> dict[str, bytes]:
        """Companion files of a version."""
        listed = json.loads(self.object(manifest["files"]["key"], manifest["files"]))
        return {f["name"]: self.object(f"files/{f['sha256']}", f) for f in listed["files"]}

    def delta(self, manifest: dict[str, Any], layout: list[Spec], parent: Model) -> dict[str, list[int]]:
        """The parent's bits, zeros for what it does not have in this form, and the changes of all rows."""
        before = {s.name: s for s in parent.layout if s.tied_to is None}
        stored = [s for s in layout if s.tied_to is None]
        spaces: dict[str, list[tuple[Spec, int]]] = {}
        flat: dict[str, list[int]] = {}
        for spec in stored:
            space = flat.setdefault(spec.dtype, [])
            spaces.setdefault(spec.dtype, []).append((spec, len(space)))
            space += parent.bits[spec.name] if before.get(spec.name) == spec else [0] * spec.elements
        touched: dict[str, set[int]] = {d: set() for d in flat}
        for ref in manifest["shards"]:
            data = self.object(ref["key"], ref)
            if data[:4] == FRAME:
                check("packed" in manifest["features"], "feature")
                data = unpacked(data)
            rows = table(data)
            check(
                len(rows) == ref["rows"] and sum(r["count"] for r in rows) == ref["changed"],
                "figures of a shard",
            )
            for row in rows:
                check(
                    row["coding"] not in ("class", "pairs") or row["coding"] in manifest["features"],
                    "feature",
                )
                check(not row.get("run") or "boxes" in manifest["features"], "feature")
                apply(row, spaces[row["dtype"]], flat[row["dtype"]], touched[row["dtype"]])
        return {s.name: flat[d][at : at + s.elements] for d, places in spaces.items() for s, at in places}


def unpacked(frame: bytes) -> bytes:
    """The Arrow file in a packed shard."""
    size = zstandard.frame_content_size(frame)
    check(0 <= size <= min(1 << 30, 16 * len(frame)), "size of a packed shard")
    content = zstandard.ZstdDecompressor(max_window_size=1 << 28).decompress(frame, allow_extra_data=False)
    check(len(content) == size, "packed shard")
    return content


def apply(row: dict[str, Any], places: list[tuple[Spec, int]], space: list[int], touched: set[int]) -> None:
    """Change one interval of a flat space, or one box in a tensor."""
    width, length, count = WIDTHS[row["dtype"]], row["length"], row["count"]
    spec, at = next((s, a) for s, a in places if s.name == row["tensor"])
    begin = at + row["offset"]
    elements, run, stride = list(range(begin, begin + length)), row.get("run", 0), row.get("stride", 0)
    check(0 <= row["offset"] < spec.elements and length >= 1, "offset or length")
    if run or stride:
        check(1 <= run < stride and run < length and length % run == 0, "run or stride")
        elements = [begin + j // run * stride + j % run for j in range(length)]
        check(elements[-1] < at + spec.elements, "box")
    check(elements[-1] < len(space), "interval")
    reached = [s for s, a in places if s.name == spec.name or at < a <= elements[-1]]
    check(row["tensors"] == len(reached), "tensors")
    check(row["shape"] == (list(spec.shape) if len(reached) == 1 else []), "shape")
    check(touched.isdisjoint(elements), "overlap")
    touched |= set(elements)
    old = [space[i] for i in elements]
    escaped = plane(row["escapes"], row["escaped"] * width)
    escapes = numbers(escaped, width)
    if row["coding"] == "whole":
        check(row["escaped"] == count == length, "whole")
        new = escapes
    elif row["coding"] == "class":
        check(len(reached) == 1 and row["escaped"] == 0 and not row["lows"], "class")
        new = by_class(row, old)
    else:
        if row["coding"] == "gap":
            positions = gaps(row)
            steps = list(plane(row["steps"], count))
        elif row["coding"] == "pairs":
            positions = gaps(row)
            steps = [half for byte in plane(row["steps"], -(-count // 2)) for half in (byte % 16, byte // 16)]
            check(count % 2 == 0 or steps.pop() == 0, "last half of a byte")
            escapes = numbers(
                bytes(b for i in range(row["escaped"]) for b in escaped[i :: row["escaped"]]), width
            )
            steps = [escapes.pop(0) if half == 15 else half for half in steps]
        else:
            dense = plane(row["steps"], length)
            positions = [i for i in range(length) if dense[i]]
            steps = [dense[i] for i in positions]
        check(len(positions) == count and 0 not in steps, "count")
        new = list(old)
        for position, step in zip(positions, steps, strict=True):
            if step == 255 and row["coding"] != "pairs":
                new[position] = escapes.pop(0)
            else:
                new[position] += step // 2 if step % 2 == 0 else -(step + 1) // 2
                new[position] %= 1 << 8 * width
            check(new[position] != old[position], "an unchanged change")
        check(not escapes, "escapes left over")
    found = [0, 0]
    for i, bits in zip(elements, new, strict=True):
        space[i] = bits
        s, a = next((s, a) for s, a in reversed(places) if a <= i < a + s.elements)
        for k in (0, 1):
            found[k] += bits * weight(s, k, i - a) if bits else 0
    check(row["digest"] == b"".join((f & MASK).to_bytes(8, "little") for f in found), "digest of a row")


def gaps(row: dict[str, Any]) -> list[int]:
    """Positions of a `gap` row."""
    data, shift = plane(row["gaps"], row["gap_bytes"]), row["gap_shift"]
    lows, used, positions, position = int.from_bytes(row["lows"], "little"), 0, [], -1
    check(len(row["lows"]) == -(-row["count"] * shift // 8), "lows")
    for _ in range(row["count"]):
        high = 0
        while data[used] == 255:
            high, used = high + 255, used + 1
        high, used = high + data[used], used + 1
        position += 1 + ((high << shift) | (lows & ((1 << shift) - 1)))
        lows >>= shift
        positions.append(position)
    check(used == len(data) and lows == 0 and position < row["length"], "planes used up")
    return positions


def by_class(row: dict[str, Any], old: list[int]) -> list[int]:
    """New bits of a `class` row."""
    shift, size, b = {"BF16": (7, 8, 16), "F16": (10, 5, 16), "F8_E4M3": (3, 4, 8), "F8_E5M2": (2, 5, 8)}[
        row["dtype"]
    ]
    line, top, listed = 1, row["gaps"][0], row["gaps"][1]
    for dimension in reversed(row["shape"]):
        if line < 64:
            line *= dimension
    run = row.get("run", 0)
    if run and run % line:
        line = run * -(-64 // run)
    phase = 0 if run else row["offset"] % line
    line_of = [(phase + i) // line for i in range(len(old))]
    exponent = [(o >> shift) % (1 << size) for o in old]
    kind = [min(max(top - x, 0), 11) for x in exponent]
    lists = Lists(row["gaps"][2:])
    check(listed <= 1 and row["gap_bytes"] == len(row["gaps"]) and row["gap_shift"] == 0, "gaps")
    head, _ = lists.read(12 + listed, 256 * row["count"] // 12)
    check(sum(head[:12]) == row["count"], "count")
    counted = list(range(len(old)))
    if listed:
        lines = line_of[-1] + 1
        check(1 <= head[12] <= lines, "listed lines")
        dead, _ = lists.read(head[12], 256 * lines // head[12])
        live = [sum(dead[: i + 1]) + i for i in range(len(dead))]
        check(live[-1] < lines, "listed lines")
        counted = [i for i in counted if line_of[i] in live]
    mean, positions = 64 * len(counted) // (head[0] + 1), list[int]()
    for c in range(12):
        numbers, mean = lists.read(head[c], mean)
        mean = max(1, mean // 2)
        inside, at = [i for i in counted if kind[i] == c], -1
        for number in numbers:
            at += number + 1
            check(at < len(inside), "a gap leads out of the row")
            positions.append(inside[at])
    check(lists.bits == 0 and 0 <= 8 * (len(row["gaps"]) - 2) - lists.used < 8, "gaps used up")
    coder, new, total, last = Coder(row["steps"]), list(old), 0, 0
    for p in sorted(positions):
        if line_of[p] != last:
            total, last = 0, line_of[p]
        rises = (coder.kept("direction", abs(total)) == 1) != (total < 0)
        total = min(max(total + (1 if rises else -1), -7), 7)
        z, step = min(max(top + 1 - exponent[p], 0), 31), 1
        if not coder.kept("one", z):
            n = 1
            while n < b - 1 and coder.kept("length", min(max(n - z + 14, 0), 31)):
                n += 1
            for _ in range(n - 1):
                step = 2 * step + coder.bit(1 << 15)
            step += 1
        up = rises == (old[p] >> (b - 1) == 0)
        new[p] = (old[p] + (step if up else -step)) % (1 << b)
    check(coder.used + 1 == len(row["steps"]) and row["steps"][-1] == (coder.low >> 24) + 1, "steps used up")
    return new


class Lists:
    """Lists of numbers in a stream of bits."""

    def __init__(self, data: bytes) -> None:
        self.bits, self.used = int.from_bytes(data, "little"), 0

    def number(self, size: int) -> int:
        number = self.bits % (1 << size)
        self.bits >>= size
        self.used += size
        return number

    def read(self, count: int, mean: int) -> tuple[list[int], int]:
        """A list of this length that begins with this mean, and the mean after it."""
        numbers = []
        for i in range(count):
            d, q = max(1, (177 * mean + 49152) // 65536), 0
            b = (d - 1).bit_length()
            u = (1 << b) - d
            while q < 32 and self.number(1) == 0:
                q += 1
            if q == 32:
                v = self.number(24)
            else:
                r = self.number(b - 1) if b else 0
                if b and r >= u:
                    r = 2 * r + self.number(1) - u
                v = q * d + r
            numbers.append(v)
            mean += (256 * v - mean) // 2 ** min(6, 2 + (i + 1).bit_length())
        return numbers, mean


class Coder:
    """Bits from an arithmetic coder."""

    def __init__(self, data: bytes) -> None:
        self.data, self.used, self.low, self.high = data, 0, 0, (1 << 32) - 1
        self.chances: dict[tuple[str, int], tuple[int, int]] = {}

    def bit(self, p: int) -> int:
        """A bit that is 1 with this chance."""
        code = int.from_bytes(self.data[self.used :][:4].ljust(4, b"\0"), "big")
        middle = self.low + (self.high - self.low) * p // 65536
        bit = int(code <= middle)
        self.low, self.high = (self.low, middle) if bit else (middle + 1, self.high)
        while self.low >> 24 == self.high >> 24:
            self.low, self.high = self.low % (1 << 24) << 8, (self.high % (1 << 24) << 8) + 255
            self.used += 1
        return bit

    def kept(self, name: str, index: int) -> int:
        """A bit with a chance that follows the bits before it."""
        p, uses = self.chances.get((name, index), (59_000 if name == "one" else 32_768, 0))
        bit = self.bit(p)
        a = 2 ** min(7, (uses + 1).bit_length())
        self.chances[name, index] = (p + (65536 - p) // a if bit else p - p // a), uses + 1
        return bit


def plane(data: bytes, raw: int) -> bytes:
    """A plane, decompressed if it is shorter than its raw length."""
    if len(data) == raw:
        return data
    check(len(data) < raw and zstandard.frame_content_size(data) == raw, "plane")
    return zstandard.ZstdDecompressor().decompress(data)


def numbers(data: bytes, width: int) -> list[int]:
    return [int.from_bytes(data[i : i + width], "little") for i in range(0, len(data), width)]


def table(data: bytes) -> list[dict[str, Any]]:
    with pa.ipc.open_file(pa.BufferReader(data)) as reader:
        rows: list[dict[str, Any]] = reader.read_all().to_pylist()
    return rows


def seeds(spec: Spec) -> list[int]:
    text = spec.name.encode() + b"\0" + spec.dtype.encode() + b"\0" + ",".join(map(str, spec.shape)).encode()
    return numbers(hashlib.blake2b(text, digest_size=16).digest(), 8)


def weight(spec: Spec, lane: int, i: int) -> int:
    """W_k(i)."""
    width = WIDTHS[spec.dtype]
    word, slot = divmod(i, 8 // width)
    if spec.mix == 2:
        high, low = divmod((seeds_of(spec)[0] + word * 0x9E3779B97F4A7C15) & MASK, 2**32)
        z = (low * 2**32 + high) ^ (low * (high | 1))
        z = (z * 0x94D049BB133111EB if lane == 0 else (z ^ seeds_of(spec)[1]) * 0xD6E8FEB86659FD93) & MASK
        z ^= z // 2**32
    else:
        z = (seeds_of(spec)[lane] + word * 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        z ^= z >> 31
    shift = 8 * width * slot if lane == 0 else 64 - 8 * width * (slot + 1)
    return (z | 1) << shift


_SEEDS: dict[Spec, list[int]] = {}


def seeds_of(spec: Spec) -> list[int]:
    if spec not in _SEEDS:
        _SEEDS[spec] = seeds(spec)
    return _SEEDS[spec]


def total(layout: list[Spec], bits: dict[str, list[int]]) -> str:
    """State digest of all untied tensors, in hex."""
    lanes = [0, 0]
    for spec in layout:
        if spec.tied_to is None:
            for k in (0, 1):
                lanes[k] += sum(v * weight(spec, k, i) for i, v in enumerate(bits[spec.name]) if v)
    return "".join(f"{lane & MASK:016x}" for lane in lanes)

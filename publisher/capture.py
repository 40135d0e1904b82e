"""What a trainer's tensors are at one moment: the encoded difference to the baseline, or, to start afresh, a copy.

A capture runs in the thread that publishes, with a pool's help, while the tensors hold still. When it returns, the
changes are found and proved, and the trainer may go on: nothing refers to its tensors any more. They are coded later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

from weightcast.codec import Geometry, Interval, Memory, digest_all, joined
from weightcast.codec.space import SMALL_ELEMENTS
from weightcast.manifest.rebuild import State, digest_of, retained, under_layout
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Corrupt, UsageError, some
from weightcast.schemas.layout import Layout, TensorSpec
from weightcast.schemas.shard import Codec

from .coder import Coder
from .label import Label
from .olds import Kept, Olds
from .rows import Rows
from .sources import Item, tied


@dataclass
class Capture:
    """A version in the making.

    Attributes:
        label: what it will say about itself.
        layout: its tensor table; known once `finish` was called.
        rows: its difference to the baseline (`fresh`: none).
        after: state digest of the captured bits, taken from them in full.
        fresh: for a reset, the whole state's memory.
        relaid: whether the layout differs from the baseline's.
        base: SHA-256 of the manifest of the version that the rows are told from.
    """

    label: Label
    rows: Rows = field(default_factory=Rows)
    geometry: Geometry | None = None
    after: Digest = field(default_factory=Digest)
    fresh: Memory | None = None
    relaid: bool = False
    base: str = ""

    @property
    def layout(self) -> Layout:
        """The tensor table."""
        if self.geometry is None:
            raise UsageError("the capture is not finished")
        return self.geometry.layout


def capture_fresh(
    found: Iterable[Item],
    label: Label,
    pool: Executor,
    *,
    before: Layout | None = None,
    drop: Collection[str] = (),
) -> Capture:
    """Copy all tensors: the state that a stream, or a reset, starts from.

    Args:
        before: the layout that they must cover, but for `drop`, where nobody asked for a fresh start.

    Raises:
        UsageError: tensors of `before` are missing, or are placeholders; or there are none. Names them.
    """
    copies: dict[str, Item] = {}
    owners: dict[tuple[object, ...], str] = {}
    for item in found:
        _refuse_twice(item, copies)
        again = item.tie is not None and owners.setdefault(item.tie, item.spec.name) != item.spec.name
        copies[item.spec.name] = replace(item, address=0, owner=None) if again else item.copied()
    ties = tied(copies.values())
    every = list(copies.values())
    geometry = Geometry(
        Layout.of(_with_tie(i.spec, ties) for i in every)
        if before is None
        else _next_layout(before, every, ties, drop)
    )
    if not len(geometry.layout):
        raise UsageError("there is no tensor to publish", hint="pass model.state_dict()")
    memory = Memory.over(geometry, {n: (i.address, i.spec.nbytes, i.owner) for n, i in copies.items()})
    capture = Capture(label, geometry=geometry, fresh=memory)
    capture.after = digest_all(geometry, memory, pool)
    capture.rows.finish()
    return capture


class DeltaCapture:
    """Compares a source with a baseline that holds still meanwhile, and fills a `Capture`."""

    def __init__(
        self,
        capture: Capture,
        state: State,
        pool: Executor,
        *,
        row_elements: int,
        level: int,
        codec: Codec,
        olds: Olds | None = None,
    ) -> None:
        """Prepare to fill `capture` with what changed since `state`, whose bits `olds` has, or its own memory."""
        self._given = olds
        capture.base = state.position.sha256
        self._capture = capture
        self._state = state
        self._pool = pool
        self._row_elements = row_elements
        self._coder = Coder(capture.rows, pool, state, level=level, codec=codec)
        self._known = state.layout.stored_by_name
        self._taken: dict[str, Item] = {}
        self._done: set[str] = set()
        self._done_ties: set[object] = set()
        self._waiting: dict[str, Item] = {}
        self._moved = Digest()

    def run(self, found: Iterable[Item], drop: Collection[str]) -> None:
        """Read the whole source. When this returns, nothing refers to the source's tensors any more.

        Raises:
            UsageError: tensors of the baseline are missing, or are placeholders; names them.
            Corrupt: the bits changed while they were compared.
        """
        try:
            for item in found:
                if item.spec.name in self._taken:
                    _refuse_twice(item, self._taken)
                self._taken[item.spec.name] = self._take(item)
            self._finish(list(self._taken.values()), drop)
        except BaseException:
            self._capture.rows.finish(failed=True)
            raise
        self._coder.start()
        self._capture.rows.finish()

    def _take(self, item: Item) -> Item:
        """Deal with one item, at once if it will not last; what remains of it."""
        spec = item.spec
        if item.lasting:
            self._waiting[spec.name] = item
            return item
        at_once = spec.elements >= SMALL_ELEMENTS and self._known.get(spec.name) == spec
        if at_once and item.tie is not None and item.tie in self._done_ties:
            pass  # another name of a tensor that was dealt with
        elif at_once:
            memory = Memory.blank(self._state.geometry)
            memory.place(spec.name, item.address, item.owner)
            space = self._state.geometry[spec.dtype]
            first = int(space.starts[space.index[spec.name]])
            step = self._row_elements
            slices = [
                Interval(spec.dtype, first + at, min(step, spec.elements - at))
                for at in range(0, spec.elements, step)
            ]
            self._encode(self._state.geometry, memory, self._olds(), slices)
            self._done.add(spec.name)
            self._done_ties.add(item.tie)
        else:
            self._waiting[spec.name] = item.copied()
        return Item(spec, 0, None, item.lasting, item.identity)

    def _finish(self, every: Sequence[Item], drop: Collection[str]) -> None:
        state, capture = self._state, self._capture
        layout, ties = state.layout, tied(every, self._done, self._known)
        if (
            ties
            or len(layout) != len(every)
            or any(self._known.get(i.spec.name) is not i.spec for i in every)
        ):
            layout = _next_layout(layout, every, ties, drop)
        capture.relaid = layout != state.layout
        geometry = Geometry(layout) if capture.relaid else state.geometry
        capture.geometry = geometry
        new = Memory.at(geometry, {n: i.address for n, i in self._waiting.items()}, self._waiting)
        old = self._olds(geometry)
        rest = geometry.intervals(self._row_elements)
        if self._done:  # what is joined around those would not nest in what another capture joins
            rest = [i for i in rest if geometry[i.dtype].describe(i).tensor not in self._done]
        else:
            rest = joined(rest, self._row_elements, self._capture.rows.codec)
        self._encode(geometry, new, old, rest)
        lost = Digest()
        if capture.relaid:
            kept = set(retained(state.layout, layout))
            lost = digest_of(
                state.geometry, state.memory, [n for n in self._known if n not in kept], self._pool
            )
        expected = state.position.digest - lost + self._moved
        if expected != capture.after:
            raise Corrupt(
                f"the changes found lead from version {state.position.version} to state {expected}, "
                f"the tensors have {capture.after}",
                hint="the tensors were written to while they were published, or memory is faulty; publish again",
            )

    def _olds(self, relaid: Geometry | None = None) -> Olds:
        """The old bits, under another layout if one is given that is not the state's."""
        state = self._state
        if relaid is None or relaid is state.geometry:
            return self._given or Kept(state.memory)
        if self._given is not None:
            raise UsageError(
                "not published, since the tensors are others than in the last version, of which no copy is kept",
                hint="publish with reset=True",
            )
        return Kept(under_layout(state.layout, state.memory, relaid))

    def _encode(self, geometry: Geometry, new: Memory, olds: Olds, intervals: Sequence[Interval]) -> None:
        for digest, change in self._coder.find(geometry, new, olds, intervals):
            self._capture.after += digest
            self._moved += change


def _with_tie(spec: TensorSpec, ties: Mapping[str, str]) -> TensorSpec:
    return replace(spec, tied_to=ties[spec.name]) if spec.name in ties else spec


def _refuse_twice(item: Item, taken: Collection[str]) -> None:
    if item.spec.name in taken:
        raise UsageError(
            f"not published, since tensor {item.spec.name!r} comes twice", hint="publish every tensor once"
        )


def _next_layout(
    before: Layout, every: Sequence[Item], ties: Mapping[str, str], drop: Collection[str]
) -> Layout:
    """The layout of the tensors found, after checking that they cover the layout before."""
    specs = {i.spec.name: _with_tie(i.spec, ties) for i in every}
    for spec in before:  # a second name that this source does not list stays tied to the first
        if spec.name not in specs and spec.tied_to in specs and spec.name not in drop:
            target = specs[spec.tied_to]
            specs[spec.name] = TensorSpec(
                spec.name, target.dtype, target.shape, target.tied_to or target.name
            )
    missing = [s.name for s in before if s.name not in specs and s.name not in drop]
    if missing:
        raise UsageError(
            f"not published, since the last version has tensors that are missing now: {some(missing)}",
            hint="publish every tensor, or name those to drop",
        )
    empty = [
        n
        for n, s in specs.items()
        if s.shape == (0,) and n in before and before[n].elements and n not in drop
    ]
    if empty:
        raise UsageError(
            f"not published, since tensors that had data are empty placeholders now: {some(empty)}",
            hint="gather the parameters before they are published",
        )
    return Layout.of(specs.values(), before.mix)

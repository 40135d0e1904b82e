"""`adamw`: the last step of decoupled AdamW, undone from what it left: parameters, moments, and the step as it was."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import torch

from weightcast.codec import Geometry
from weightcast.codec.rounding import round_all
from weightcast.schemas.digest import Digest

from .detector import Attempt, Detector, every_piece, values
from .kernels import Bits, Positions, invert, look
from .ledger import Ledger
from .pieces import Piece
from .steps import Rates, Step, Steps, reach, refusal


class AdamW(Detector):
    """Tells the old bits of fp32 parameters that are published in bf16 and have made at most one step since.

    Keeps nothing but the ledger: in all, less than a thousandth of the parameters at learning rates up to 1e-5.
    """

    kind = "adamw"

    def __init__(self) -> None:
        super().__init__()
        self._optimizers: list[Steps] = []
        self._ledger = Ledger()  # of the state with this digest
        self._digest: Digest | None = None
        self._next = Ledger()

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        self.refused = self.refused or refusal(optimizer)
        self._optimizers.append(Steps(optimizer))

    def tells(self, digest: Digest) -> str:
        """See `Detector`."""
        for steps in self._optimizers:
            steps.complete()
        fault = next((steps.fault for steps in self._optimizers if steps.fault), "")
        if self._digest != digest:
            return "the last version that was captured is not committed"
        if any(steps.most > 1 for steps in self._optimizers):
            return "there was more than one step since the last version"
        return fault

    def begin(self, geometry: Geometry) -> Attempt:
        """See `Detector`."""
        self._next = Ledger()
        return _Undone(self, geometry, self._ledger, self._next)

    def look(self, geometry: Geometry, row_elements: int, pool: Executor) -> None:
        """See `Detector`."""
        self._next = Ledger()

        def one(piece: Piece) -> None:
            self.parameter(piece.name).note(piece, np.empty(piece.end - piece.begin, np.uint16), self._next)

        for _ in pool.map(one, every_piece(geometry, row_elements, self)):
            pass

    def forget(self) -> None:
        """See `Detector`."""
        self._digest = None

    def settle(self, digest: Digest) -> None:
        """See `Detector`."""
        self._ledger, self._next, self._digest = self._next, Ledger(), digest
        for steps in self._optimizers:
            steps.complete()
            steps.forget()

    @property
    def nbytes(self) -> int:
        """See `Detector`."""
        return self._ledger.nbytes + self.copies.nbytes

    def close(self) -> None:
        """See `Detector`."""
        for steps in self._optimizers:
            steps.close()

    def parameter(self, name: str) -> _Parameter:
        """What there is to know of a watched tensor."""
        tensor = self._watched[name]
        for steps in self._optimizers:
            group = steps.group_of(tensor)
            if group is not None:
                return _Parameter(tensor, steps.step_of(tensor), reach(group), 1 / Rates.of(group).decay)
        return _Parameter(tensor, None, None, 1.0)


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A watched tensor, the step that it made, what the next one may move it by (None: nothing steps it), and 1 / d."""

    tensor: torch.Tensor
    step: Step | None
    reach: float | None
    undo: float

    def note(self, piece: Piece, out: Bits, ledger: Ledger) -> None:
        """Note a piece that has made no step, and write its bits to `out`."""
        new, nears = values(self.tensor, piece), np.empty(piece.end - piece.begin, np.uint32)
        count = look(new, self.undo, self.reach or 0.0, out, nears)
        if self.reach is not None:  # what nothing steps is never open
            ledger.note(piece.name, piece.begin, len(new), nears[:count], out[nears[:count]])

    def invert(self, step: Step, piece: Piece, out: Bits, ledger: Ledger) -> Positions:
        """Undo `step`, and note what it led to; which elements are open."""
        new = values(self.tensor, piece)
        opens, nears = np.empty(len(new), np.uint32), np.empty(len(new), np.uint32)
        opened, near = invert(
            new, values(step.mean, piece), values(step.square, piece),
            step.decay, np.float32(step.size), np.float32(step.root), np.float32(step.eps), self.reach or 0.0,
            out, opens, nears,
        )  # fmt: skip
        bits = np.empty(near, np.uint16)
        round_all(new[nears[:near]].view(np.uint32), bits)
        ledger.note(piece.name, piece.begin, len(new), nears[:near], bits)
        return opens[:opened]


class _Undone(Attempt):
    """Undoes the step of each piece, and notes for the next one what lies near a boundary now."""

    def __init__(self, detector: AdamW, geometry: Geometry, ledger: Ledger, after: Ledger) -> None:
        super().__init__(detector, geometry)
        self._adamw = detector
        self._ledger = ledger
        self._after = after

    def _old(self, piece: Piece, out: Bits) -> int:
        parameter = self._adamw.parameter(piece.name)
        if parameter.step is None:
            parameter.note(piece, out, self._after)
            return 0
        opens = parameter.invert(parameter.step, piece, out, self._after)
        return self._ledger.settle(piece.name, piece.begin, opens, out)

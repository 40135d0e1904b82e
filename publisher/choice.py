"""`--codec auto`: for each version `gap` or `class`, by what the last ones cost to code and to send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from weightcast.schemas.shard import Codec

Chosen = Literal["gap", "class"]

CLASS_BYTES: Final = 0.71
"""Bytes of `class` for each of `gap`, until both were seen: 0.67 to 0.72 on the real trace (decisions 009, 013)."""

CLASS_ELEMENT_S: Final = 0.2e-9
CLASS_CHANGE_S: Final = 27e-9
"""Seconds that `class` takes longer, an element and a change, until both were seen: a line through decision 009's
figures of 0.3, 1 and 4 %."""

READERS: Final = 1.6
"""What readers take longer to decode `class`, for each second that the writer takes longer: decision 009. They are
taken to have as many threads as the writer."""

RELUCTANCE: Final = 1.25
"""By how much the other coding must be better before it is taken: what is measured varies by as much."""

LEAST_SENT_BYTES: Final = 1 << 20
"""Versions of fewer bytes do not tell how fast the link is, only how long a round trip takes."""

_FORGOTTEN_AFTER: Final = 50
"""Versions after which figures of a coding that is not in use are forgotten, so that one odd version does not rule
it out for good."""

_SIMILAR: Final = 2.0  # densities by whose factor figures of one version say something about another
_OLD: Final = 0.5  # weight of what was known before, against one more version


@dataclass(frozen=True, slots=True)
class Cost:
    """What coding a version, or a mean of versions, took.

    Attributes:
        elements: of the model.
        changed: elements.
        nbytes: of shards.
        coding_s: of one thread.
    """

    elements: float
    changed: float
    nbytes: float
    coding_s: float

    def mixed(self, newer: Cost) -> Cost:
        """The mean of this and a newer one."""
        old, new = _OLD, 1 - _OLD
        return Cost(
            old * self.elements + new * newer.elements,
            old * self.changed + new * newer.changed,
            old * self.nbytes + new * newer.nbytes,
            old * self.coding_s + new * newer.coding_s,
        )

    def resembles(self, other: Cost) -> bool:
        """Whether its bytes and seconds a change say something about `other`, whose density may differ."""
        mine, others = self.changed * other.elements, other.changed * self.elements
        return 0 < mine <= _SIMILAR * others and others <= _SIMILAR * mine


def gain(gap: Cost | None, by_class: Cost | None, like: Cost, link_bytes_s: float, threads: int) -> float:
    """Seconds of the link that `class` saves, for each second that it costs writer and readers.

    Args:
        gap, by_class: what each coding cost when it was last used, if it was.
        like: the version before, which the next one is taken to be like.
        link_bytes_s: how fast shards were uploaded.
        threads: that code at once.
    """
    gap = gap if gap is not None and gap.resembles(like) else None
    by_class = by_class if by_class is not None and by_class.resembles(like) else None
    if gap is not None and by_class is not None:
        saved = gap.nbytes / gap.changed - by_class.nbytes / by_class.changed
        extra_s = by_class.coding_s / by_class.changed - gap.coding_s / gap.changed
    else:
        known = gap or by_class
        if known is None:
            return 1.0  # nothing is known: stay
        saved = known.nbytes / known.changed * ((1 - CLASS_BYTES) if gap else (1 / CLASS_BYTES - 1))
        extra_s = CLASS_ELEMENT_S * like.elements / like.changed + CLASS_CHANGE_S
    cost_s = max(extra_s, 0.0) * (1 + READERS) / threads
    if saved <= 0:
        return 0.0
    return saved / link_bytes_s / cost_s if cost_s else float("inf")


def choose(now: Chosen, found: float) -> Chosen:
    """The coding of the next version: the one in use, unless the other is clearly better; `found`: see `gain`."""
    if found > RELUCTANCE:
        return "class"
    if found < 1 / RELUCTANCE:
        return "gap"
    return now


class CodecChoice:
    """What a publisher's next version is coded with. One thread notes, another asks.

    Args:
        codec: the setting; anything but `auto` is what it says.
        threads: that code at once.
    """

    def __init__(self, codec: Codec, threads: int) -> None:
        self._auto = codec == "auto"
        self._threads = threads
        self._codec: Chosen = "class" if codec == "class" else "gap"
        self._costs: dict[str, Cost] = {}
        self._versions = 0
        self._used: dict[str, int] = {}  # the last version by each coding
        self._link: tuple[float, float] | None = None  # bytes, seconds

    @property
    def codec(self) -> Codec:
        """For the next version."""
        return self._codec

    @property
    def link_bytes_s(self) -> float | None:
        """How fast the last versions were uploaded; None if they were too small to tell."""
        return self._link[0] / self._link[1] if self._link is not None and self._link[1] > 0 else None

    def note(self, codec: Codec, cost: Cost, busy_s: float) -> None:
        """A version was coded and uploaded; `busy_s`: seconds in which any of its shards was on its way."""
        if not cost.changed:
            return
        self._versions += 1
        self._remember(codec, cost)
        if cost.nbytes >= LEAST_SENT_BYTES:
            sent, took = self._link or (0.0, 0.0)
            self._link = _OLD * sent + cost.nbytes, _OLD * took + busy_s
        link = self.link_bytes_s
        if self._auto and link is not None:
            found = gain(self._costs.get("gap"), self._costs.get("class"), cost, link, self._threads)
            self._codec = choose(self._codec, found)

    def _remember(self, codec: str, cost: Cost) -> None:
        if codec in self._used:  # the first version by a coding may have had to compile it
            before = self._costs.get(codec)
            similar = before is not None and before.resembles(cost)
            self._costs[codec] = before.mixed(cost) if before is not None and similar else cost
        self._used[codec] = self._versions
        for other in [c for c, last in self._used.items() if last < self._versions - _FORGOTTEN_AFTER]:
            self._costs.pop(other, None)
            del self._used[other]

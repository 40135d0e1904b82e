"""Documents between a subscriber and the plugin inside a rollout engine's server (docs/vllm.md).

Both sides run on one host and may be different releases, so every document is checked by the side that reads it.
Weights never travel in these documents: they name files on a folder that both sides see.
"""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field

PROTOCOL: Final = 1
"""Of these documents; a server with another one is refused."""

PREFIX: Final = "/weightcast"
TOKEN_VARIABLE: Final = "WEIGHTCAST_TOKEN"

PauseMode = Literal["wait", "keep", "abort"]
"""What happens to requests in flight: they finish first; they freeze and go on under the new weights; they end."""

Hex128 = Field(pattern=r"^[0-9a-f]{32}$")
Hex256 = Field(pattern=r"^[0-9a-f]{64}$")


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Held(_Document):
    """A version, and the state digest that proves it."""

    stream: str
    version: int = Field(ge=0)
    sha256: str = Hex256
    digest: str = Hex128


class RankRow(_Document):
    """What one worker process says of itself."""

    rank: str  # "dp0-pp0-tp0"
    process: str  # random; another one after a restart
    session: str | None = None  # of the subscriber that drives it
    held: Held | None = None  # None: not known
    layout: str | None = None  # SHA-256 of the layout that its plan is for
    whole: bool = True  # False: a write began and its outcome was not confirmed


class ServerState(_Document):
    """Answer of `state`."""

    protocol: int
    weightcast: str
    engine: str  # "vllm 0.32.0"
    model: str  # what the server was started with
    weight_version: str | None  # the engine's own label, where it has one
    paused: bool
    sleeping: bool
    ranks: list[RankRow]

    @property
    def held(self) -> Held | None:
        """The version that every rank holds whole; None if they do not agree on one."""
        first = self.ranks[0].held if self.ranks else None
        return first if all(row.whole and row.held == first for row in self.ranks) else None


class Pulse(_Document):
    """Answer of `pulse`, which no worker is asked for: vLLM's workers spin for a second after each call."""

    process: str  # random id of the API server process; another one after a restart
    resting: bool  # an engine is paused, or sleeps


class Region(_Document):
    """A recorded move's source, and the digest of the live bits that it leads to."""

    tensor: str
    shape: list[int]
    strides: list[int]
    offset: int
    digest: str = Hex128


class RankReport(_Document):
    """What one rank found when it recorded its plan."""

    regions: list[Region]
    refused: dict[str, str]  # checkpoint name -> why it cannot be patched in place here
    absent: list[str]  # names without a destination here


class AttachRequest(_Document):
    """Record a plan for a layout. The session that asks takes the server over."""

    session: str
    layout: str  # path of the layout's Arrow file
    layout_sha256: str = Hex256
    dense: bool = (
        False  # whether modules that cannot be patched may be reloaded whole, from `InstallRequest.mirror`
    )
    mirror: str | None = (
        None  # checkpoint folder to try that with; else, or empty: what the server was started with
    )


class AttachReport(_Document):
    """Which tensors can be kept at a version, and what the live bits are."""

    tensors: int  # stored tensors of the layout
    dense: dict[str, str]  # name -> why its module is reloaded whole
    refused: dict[str, str]  # name -> why it cannot be kept at a version at all
    digest: str = Hex128  # of the live bits of all tensors but these
    seconds: float
    ranks: list[RankRow]


class AdoptRequest(_Document):
    """The live bits were proved to be this version."""

    session: str
    held: Held


class ReadRequest(_Document):
    """Live bits at flat positions of the layout.

    `positions` holds int64 [n] for each dtype of `counts`, in its order, end to end; `values` is a file that has
    room for the bits, each dtype's begin at a multiple of 8 bytes.
    """

    session: str
    layout_sha256: str = Hex256
    counts: dict[str, int]
    positions: str
    values: str


class ReadReport(_Document):
    """`values` is filled."""

    seconds: float


class InstallRequest(_Document):
    """Go to a version by absolute values."""

    session: str
    layout_sha256: str = Hex256
    staged: str  # path of the staged values (subscriber/journal.py)
    base: Held  # the values lead from here, or from any version between the two
    target: Held
    pause: PauseMode = "keep"
    mirror: str | None = None  # checkpoint folder at the target version, for modules that are reloaded whole


class LoadRequest(_Document):
    """Go to a version by whole tensors."""

    session: str
    layout_sha256: str = Hex256
    files: list[str]  # safetensors files that hold every tensor of the layout
    target: Held
    pause: PauseMode = "keep"


class InstallReport(_Document):
    """The engine serves the target version."""

    held: Held
    written: int  # elements of the layout, however many ranks hold them
    drain_s: float  # from the pause request until nothing runs
    write_s: float
    paused_s: float  # from the pause request until generation goes on
    ranks: list[RankRow]


class VerifyRequest(_Document):
    """Read all live weights and digest them."""

    session: str | None = None


class VerifyReport(_Document):
    """What the live bits are, whatever the ranks say they hold."""

    digest: str = Hex128
    held: Held | None
    good: bool  # the digest is the held version's, and all holders of a part agree
    faults: list[str]  # what is not as it should be
    seconds: float
    ranks: list[RankRow]


class Fault(_Document):
    """Answer to a request that failed."""

    kind: str  # as in weightcast.schemas.errors
    message: str
    hint: str = ""
    paused: bool = False  # the engine was left paused, since its ranks may hold different weights

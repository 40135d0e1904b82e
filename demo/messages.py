"""What the trainer and its rollout processes tell each other: one JSON document a line, over pipes.

The end of a process's input is a message, too: the trainer is gone, so the process ends at once.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from .config import DemoConfig


class Message(BaseModel):
    """Base of all messages: frozen, strict, closed."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    def line(self) -> bytes:
        """As one line of JSON."""
        return self.model_dump_json().encode() + b"\n"


class Job(Message):
    """To a process, first: what to do.

    Attributes:
        name: the subscriber's.
        incarnation: how often it was started before; a new one samples anew.
        root: of the stream, which exists.
        first_version: to generate with. Those before it are passed on the way: they may be another run's, and
            are too old in any case.
        store: fields of `StoreSettings`.
        spool: folder for its batches.
        config: of the run.
    """

    kind: Literal["job"] = "job"
    name: str
    incarnation: int
    root: str
    first_version: int
    store: dict[str, Any]
    spool: str
    config: DemoConfig


class Finish(Message):
    """To a process, last: go to this version, then send a `Proof`."""

    kind: Literal["finish"] = "finish"
    version: int


class Applied(Message):
    """From a process: its live weights are this version now.

    Attributes:
        version: of the stream.
    """

    kind: Literal["applied"] = "applied"
    version: int


class Proof(Message):
    """From a process, last: which bits its live weights have, read from them afresh.

    Attributes:
        version: that it holds.
        digest: the state digest, taken over all elements.
        sha256: of each tensor's bytes, by name.
    """

    kind: Literal["proof"] = "proof"
    version: int
    digest: str
    sha256: dict[str, str]


class Failed(Message):
    """From a process: it cannot go on."""

    kind: Literal["failed"] = "failed"
    message: str
    hint: str


Command = Annotated[Job | Finish, Field(discriminator="kind")]
Report = Annotated[Applied | Proof | Failed, Field(discriminator="kind")]
COMMANDS: TypeAdapter[Job | Finish] = TypeAdapter(Command)
REPORTS: TypeAdapter[Applied | Proof | Failed] = TypeAdapter(Report)

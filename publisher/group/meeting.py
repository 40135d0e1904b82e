"""One step that all ranks take together: everyone brings a text, rank 0 decides, everyone learns what.

Nobody leaves before. A rank that is still at work says so from time to time, as does rank 0 while it decides, so that
only silence counts as failure. An error of any rank, or in the decision, is raised on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from weightcast.schemas.errors import KINDS, WeightcastError

from .messenger import Messenger, Silence

_TICKS: Final = 4
"""Signs of life within a timeout."""


class Word(BaseModel):
    """What a rank says in a meeting.

    `text`: it is done; `working`: not yet. Rank 0 answers `text`, `again` (some are not done), `working` (it decides).
    `error`: `text` is the message, `error` the kind.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    is_: Literal["text", "working", "again", "error"]
    text: str = ""
    error: str = ""
    hint: str = ""

    @classmethod
    def of(cls, error: BaseException, rank: int | None = None) -> Word:
        """An error as a word; `rank` says whose it is."""
        if isinstance(error, WeightcastError):
            kind, message, hint = error.kind, error.message, error.hint
        else:
            kind, message, hint = WeightcastError.kind, f"{type(error).__name__}: {error}", ""
        where = "" if rank is None else f"rank {rank}: "
        return cls(is_="error", text=where + message, error=kind, hint=hint)

    def raised(self) -> WeightcastError:
        """The error that an error's word stands for."""
        return KINDS.get(self.error, WeightcastError)(self.text, hint=self.hint)


class Council:
    """Holds meetings of a group. Used by two threads at a time, under different topics."""

    def __init__(self, messenger: Messenger, helper: Executor) -> None:
        self.messenger = messenger
        self._helper = helper

    @property
    def _tick_s(self) -> float:
        return self.messenger.timeout_s / _TICKS

    def meet(self, topic: str, work: Future[str] | str, decide: Callable[[list[str]], str]) -> str:
        """What rank 0 decided.

        Args:
            topic: the same on all ranks, and used once.
            work: what this rank brings, or will bring.
            decide: from all ranks' texts by rank to what all are told. Called on rank 0 alone, in a helper thread.

        Raises:
            Silence: nothing was heard of rank 0; what it decided, if it did, is unknown.
            StorageError: a rank was silent for too long.
            WeightcastError: a rank's `work` failed (the message names it), or `decide` did; on all ranks the same.
        """
        turn = 0
        while True:
            said = self._said(work)
            answer = self._turn(f"{topic}.{turn}", said, decide)
            if answer.is_ == "text":
                return answer.text
            if answer.is_ == "error":
                raise answer.raised()
            turn += 1

    def _said(self, work: Future[str] | str) -> Word:
        if isinstance(work, str):
            return Word(is_="text", text=work)
        try:
            error = work.exception(self._tick_s)
        except FutureTimeout:
            return Word(is_="working")
        if error is not None:
            return Word.of(error, self.messenger.rank)
        return Word(is_="text", text=work.result())

    def _turn(self, topic: str, said: Word, decide: Callable[[list[str]], str]) -> Word:
        """One gathering, and rank 0's last word on it."""
        try:
            gathered = self.messenger.gather(topic, said.model_dump_json())
        except Silence as error:
            if self.messenger.rank:
                raise
            return self._answer(f"{topic}.0", Word.of(error))
        if gathered is None:
            return self._listen(topic)
        words = [Word.model_validate_json(text) for text in gathered]
        for word in words:
            if word.is_ == "error":
                return self._answer(f"{topic}.0", word)
        if any(word.is_ == "working" for word in words):
            return self._answer(f"{topic}.0", Word(is_="again"))
        return self._decided(topic, [word.text for word in words], decide)

    def _decided(self, topic: str, texts: list[str], decide: Callable[[list[str]], str]) -> Word:
        deciding = self._helper.submit(decide, texts)
        number = 0
        try:
            while not wait([deciding], self._tick_s).done:
                self._answer(f"{topic}.{number}", Word(is_="working"))
                number += 1
        finally:
            wait([deciding])  # even where nobody can be told: decisions are made one at a time
        error = deciding.exception()
        word = Word(is_="text", text=deciding.result()) if error is None else Word.of(error)
        return self._answer(f"{topic}.{number}", word)

    def _listen(self, topic: str) -> Word:
        number = 0
        while True:
            word = Word.model_validate_json(self.messenger.broadcast(f"{topic}.{number}", None))
            if word.is_ != "working":
                return word
            number += 1

    def _answer(self, topic: str, word: Word) -> Word:
        self.messenger.broadcast(topic, word.model_dump_json())
        return word

"""One rank in the meetings of a publish: how it stands, what it takes part in deciding, what it learns."""

from __future__ import annotations

import logging
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from weightcast.manifest.chain import Position
from weightcast.manifest.stream import StreamReader
from weightcast.publisher.job import announce
from weightcast.publisher.sources import Casts
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import UsageError, WeightcastError
from weightcast.schemas.settings import PublisherSettings

from .chair import Chair
from .draft import Draft, Stage
from .flight import Flight
from .load import load
from .meeting import Council
from .messenger import Silence
from .share import Pools, Share
from .tables import encode_table
from .turn import Turn, attempt, position_of
from .words import Contribution, Decision, Division, Outcome, Ready, Status

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Made:
    """What `publish` made before it returned: the draft, and digests of what other ranks have too, by group."""

    draft: Draft
    replicas: dict[int, dict[int, Digest]]

    def contribution(self) -> str:
        """What is handed to rank 0, once it is stored."""
        replicas = {group: sum(found.values(), Digest()).hex for group, found in self.replicas.items()}
        return Contribution(part=self.draft.finished(), replicas=replicas).text


@dataclass(frozen=True)
class Taken:
    """A share that a rank took up, what it says of it, and, on rank 0, the digest of what the head has and no rank."""

    share: Share
    ready: Ready
    lost: Digest


class Member:
    """Goes through one publish after the other. `agree`, `divide` and `make` are called by one thread, then `finish`.

    Args:
        council: of the group.
        helper: for what may take long while the others are told that it does.
        pools: for the work itself.
        settings: as given.
        casts: conversions that the user asked for.
        reader: of the stream.
        chair: on rank 0.
    """

    def __init__(
        self,
        council: Council,
        helper: Executor,
        pools: Pools,
        settings: PublisherSettings,
        casts: Casts,
        reader: StreamReader,
        chair: Chair | None,
    ) -> None:
        self._council = council
        self._helper = helper
        self._pools = pools
        self._settings = settings
        self._casts = casts
        self._reader = reader
        self._chair = chair
        self._plan = ""
        self._share: Share | None = None
        self._unresolved: tuple[int, Draft] | None = None

    @property
    def rank(self) -> int:
        """Of this process."""
        return self._council.messenger.rank

    @property
    def elements(self) -> int:
        """Elements that this rank owns; 0 before the first publish."""
        return self._share.holding.elements if self._share is not None else 0

    def agree(self, turn: Turn, flight: Flight) -> Decision:
        """What all ranks do now, once no version is on its way or it is decided not to wait for it.

        Raises:
            WeightcastError: what was asked of a rank is wrong, or rank 0 was not told of an earlier error.
        """
        again = 0
        while True:
            work = attempt(lambda: self._status(turn, flight.busy).text)
            topic = f"publish-{turn.number}/status-{again}"
            try:
                said = self._council.meet(topic, work, lambda t: self._open(t, turn, flight))
            except WeightcastError as error:
                flight.heard(error)
                raise
            decision = Decision.model_validate_json(said)
            if decision.do != "wait":
                return decision
            flight.join()
            again += 1

    def _status(self, turn: Turn, busy: bool) -> Status:
        table, share = turn.held.table, self._share
        return Status(
            plan=self._plan if share is not None and share.table == table else "",
            base=share.base if share is not None else "",
            open=self._unresolved[0] if self._unresolved is not None else 0,
            busy=busy,
        )

    def _open(self, texts: list[str], turn: Turn, flight: Flight) -> str:
        decision = self._the_chair().open_turn(texts, turn.wish)
        if decision.do in ("go", "plan"):
            flight.raise_untold()
        return decision.text

    def _follow_late(self, decision: Decision) -> None:
        """Learn how the version ended that this rank could not hear of.

        Raises:
            Corrupt: it does not lead to what was published; this rank's copy is of no use.
        """
        if self._unresolved is None:
            return
        (number, draft), self._unresolved = self._unresolved, None
        if decision.committed and decision.last == number and self._share is not None:
            self._share.follow(draft, position_of(decision.committed))

    def divide(self, turn: Turn, decision: Decision) -> None:
        """Agree on who owns what, and take up the head's bits of it.

        Raises:
            WeightcastError: as `Chair.divide` and `Chair.accept`, or the head could not be had; on all ranks.
        """
        self._share, self._plan, self._unresolved = None, "", None
        topic = f"publish-{turn.number}"
        table = attempt(lambda: encode_table(turn.held.table))
        said = self._council.meet(
            f"{topic}/plan", table, lambda t: self._the_chair().divide(t, turn.wish, decision.fresh).text
        )
        told = Division.model_validate_json(said)
        taken = self._helper.submit(self._take_up, turn, told)
        ready = self._helper.submit(lambda: taken.result().ready.text)
        self._council.meet(
            f"{topic}/ready", ready, lambda t: self._the_chair().accept(t, told, taken.result().lost)
        )
        self._share, self._plan = taken.result().share, told.plan

    def _take_up(self, turn: Turn, told: Division) -> Taken:
        """In a helper thread, which may outlast the publish if another rank has failed."""
        table = turn.held.table
        share = Share(table, told.shared[self.rank], self._settings, self._pools, self.rank, told.mix)
        lost = Digest()
        if told.head:
            head = position_of(told.head)
            gone = self._chair.gone() if self._chair is not None else []
            lost = load(
                self._reader, head, share.holding, gone, self._pools.compute, self._settings.row_elements
            )
            share.is_at(head.sha256)
        with turn.reading() as found:
            groups = share.replicas(found, self._casts).values()
        replicas = {at: digest.hex for group in groups for at, digest in group.items()}
        return Taken(share, Ready(digest=share.digest.hex, replicas=replicas), lost)

    def make(self, turn: Turn, decision: Decision, check_replicas: bool) -> Made:
        """Compare, or copy. After this nothing refers to the trainer's tensors."""
        self._follow_late(decision)
        base = None if decision.fresh else decision.base
        stage = Stage(decision.version, base, self.rank, self._council.messenger.size)
        share = self._the_share()
        draft = share.draft(turn.held, self._casts, self._reader.store, stage)
        check = check_replicas and decision.do == "go"  # a new plan has just done so
        return Made(draft, share.replicas(turn.held, self._casts) if check else {})

    def finish(self, turn: Turn, made: Future[Made]) -> Position:
        """Hand the part over, once it is stored; the version that it is in.

        Raises:
            Silence: nothing was heard of what became of it.
            StorageError: that is not known to anybody.
            WeightcastError: nothing was committed.
        """
        work = self._helper.submit(lambda: made.result().contribution())
        topic = f"publish-{turn.number}/parts"
        try:
            said = self._council.meet(topic, work, lambda t: self._the_chair().commit(t, turn.wish).text)
            outcome = Outcome.model_validate_json(said)
        except Silence:
            if made.exception() is None:
                self._unresolved = turn.number, made.result().draft
            raise
        finally:
            if made.exception() is None:
                made.result().draft.cancel()
        if outcome.unknown is not None:
            self._unresolved = turn.number, made.result().draft
            raise outcome.unknown.raised()
        position = position_of(outcome.manifest)
        try:
            self._the_share().follow(made.result().draft, position)
        except Exception as error:  # noqa: BLE001 - committed all the same; the next publish finds the copy to be of none
            log.warning("rank %d rebuilds its copy: %s", self.rank, error)
        if self.rank == 0:
            announce(position.manifest)
        return position

    def _the_chair(self) -> Chair:
        if self._chair is None:
            raise UsageError("only rank 0 decides")
        return self._chair

    def _the_share(self) -> Share:
        if self._share is None:
            raise UsageError("nothing was divided among the ranks yet")
        return self._share

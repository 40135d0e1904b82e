"""`GroupPublisher`: what all ranks of a trainer call."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Any, Literal, SupportsIndex

import torch.distributed as dist

from weightcast.codec.threads import Workers
from weightcast.manifest.commit import Writer, create_stream
from weightcast.manifest.store import Store, open_store
from weightcast.manifest.stream import StreamReader
from weightcast.publisher.audience import Audience
from weightcast.publisher.closing import OneProcess
from weightcast.publisher.job import PendingVersion
from weightcast.publisher.label import Label
from weightcast.publisher.sources import Casts
from weightcast.publisher.upload import Uploader
from weightcast.schemas.errors import StorageError, UsageError, WeightcastError
from weightcast.schemas.settings import PublisherSettings

from .chair import Chair
from .flight import Flight
from .meeting import Council
from .member import Member
from .messenger import Alone, Messenger
from .share import Pools
from .tables import Sharded, held
from .torch_messenger import TorchMessenger
from .turn import Asked, Turn, attempt, fenced, head_of

Busy = Literal["wait", "skip"]


class GroupPublisher(Audience, OneProcess):
    """Publishes a policy that lies on several ranks. All of them make it together, publish alike, and close it.

    Each rank compares, encodes and uploads what it owns of its own slices; rank 0 commits. Short texts pass between
    ranks; weights never do. Close it before `destroy_process_group()`. Questions about readers (`version_of`, `lags`,
    `wait_for`) any rank may ask, by itself.

    Opening makes the stream if nothing is there; of an existing one rank 0 commits an empty version, so that a
    predecessor that was only slow can commit nothing more.

    Args:
        root: URL or path of the stream, the same on all ranks.
        messenger: how ranks talk; None: through torch.distributed if it is up, else this process is alone.
        settings: how to work; from the environment and defaults if not given. With `baseline`, rank N maps the file of
            that name and `.N` for its copy; it is not used again by a later run.
        store: an opened store, instead of `root`'s.
        fence: whether to commit that empty version.
        resume: whether to go on from the head; False: the first version starts afresh.
        check_replicas: whether each publish proves that what several ranks hold is equal on all of them: one read of
            that. False: only the first one does.

    Raises:
        Conflict: another publisher is committing to the stream right now.
        UsageError: the ranks have opened different streams.
        StorageError: the store failed, or a rank was silent for too long.
    """

    def __init__(
        self,
        root: str,
        messenger: Messenger | None = None,
        settings: PublisherSettings | None = None,
        *,
        store: Store | None = None,
        fence: bool = True,
        resume: bool = True,
        check_replicas: bool = True,
    ) -> None:
        self._check_replicas = check_replicas
        self.settings = settings or PublisherSettings()
        self._messenger = messenger or _default_messenger()
        self._casts = Casts(self.settings.cast)
        self._pools = Pools(
            Workers(self.settings.threads, "weightcast-encode"), Workers(8, "weightcast-upload")
        )
        self._helper = Workers(4, "weightcast-group")  # at once: work and decision, of both threads
        self._publishing = threading.Lock()
        self._number = 0
        self._left = False
        self._flight = Flight()
        OneProcess.__init__(self)
        self._chair: Chair | None = None
        try:
            opened = self._helper.submit(lambda: self._set_store(store or open_store(root)))
            council = Council(self._messenger, self._helper)
            council.meet("open", opened, lambda _: self._take_chair(resume, fence))
            found = attempt(lambda: StreamReader.open(self._store))
            council.meet("opened", attempt(lambda: found.result().stream.stream), _all_one)
        except BaseException:
            self._stop()
            self._leave()  # the others have still to hear why
            raise
        self._member = Member(
            council, self._helper, self._pools, self.settings, self._casts, found.result(), self._chair
        )

    def _set_store(self, store: Store) -> str:
        self._store = store
        return ""

    def _take_chair(self, resume: bool, fence: bool) -> str:
        """Rank 0: open the stream, and fence it."""
        reader = create_stream(self._store, single_writer=self.settings.single_writer)
        uploader = Uploader(reader, Writer.fresh(self.settings.writer), self.settings, self._pools.transfer)
        position = fenced(reader, uploader) if fence and resume else head_of(reader)
        self._chair = Chair(uploader, self._messenger, position, resume=resume)
        return ""

    @property
    def rank(self) -> int:
        """Of this process in the group."""
        return self._messenger.rank

    @property
    def version(self) -> int | None:
        """The last version that this rank knows to be committed by this publisher."""
        return self._flight.version

    @property
    def elements(self) -> int:
        """Elements that this rank owns, of all tensors; 0 before the first publish."""
        return self._member.elements

    @property
    def broken(self) -> WeightcastError | None:
        """Why nothing more can be published, if so. Known to rank 0; the others are told when they publish."""
        return self._chair.dead if self._chair is not None else None

    def publish(
        self,
        tensors: Sharded,
        *,
        step: SupportsIndex | None = None,
        metadata: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        drop: Collection[str] = (),
        reset: bool = False,
        busy: Busy = "wait",
    ) -> PendingVersion | None:
        """Publish the tensors of all ranks as the next version. On every rank, with what that rank has.

        Returns as soon as they have been compared with what was published last, and what changed is coded; or they
        are copied for a first version. From then on the trainer may change them. The rest happens in the background.
        All arguments but `tensors` count on rank 0 alone.

        Args:
            tensors: of this rank, as a mapping (`model.state_dict()`), (name, tensor) pairs or slices; DTensors are
                what they are. Ranks may have different tensors, and none.
            step: the trainer's step, kept beside the version.
            metadata: JSON values, for people and frameworks; at most 64 KiB.
            files: companion files by name (config, tokenizer); None: as in the version before.
            drop: names that the version before has and this one no longer has.
            reset: start afresh from a snapshot, whatever the stream held.
            busy: what to do while the version before is on its way: wait for it, or skip this one.

        Returns:
            The version on its way, which ends in the same way on all ranks; None on all ranks if it was skipped.

        Raises:
            UsageError: the tensors cannot be published, or do not fit those of other ranks; on all ranks, and nothing
                was published.
            StorageError: a rank was silent for too long, or it is unknown whether the version before is committed.
            WeightcastError: an earlier version failed, and nobody waited for it on rank 0; once, and this one was not
                published.
        """
        self._check_usable()
        with self._publishing:
            self._number += 1

            def look() -> Asked:
                return Asked(Label.of(step, metadata, files), frozenset(drop), held(tensors, self._casts))

            turn = Turn(self._number, attempt(look), reset, busy == "wait")
            try:
                return self._take(turn)
            finally:
                turn.forget()

    def _take(self, turn: Turn) -> PendingVersion | None:
        """Go through a publish until the trainer's tensors are not needed any more; the rest is in the background."""
        member = self._member
        decision = member.agree(turn, self._flight)
        if decision.do == "skip":
            return None
        if decision.do == "plan":
            member.divide(turn, decision)
        made = attempt(lambda: member.make(turn, decision, self._check_replicas))
        return self._flight.start(lambda: member.finish(turn, made))

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until the version on its way is settled; False if time ran out. Needs no other rank."""
        return self._flight.join(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Wait for what is on its way, then stop. Needs no other rank, but rank 0 waits up to 2 s for them to close.

        Raises:
            WeightcastError: a version was not committed and nobody was told yet, or time ran out.
        """
        self._closed = True
        if self._is_copy:
            return
        finished = self._flight.join(timeout)
        self._stop()
        if finished:
            self._leave()
        else:
            raise StorageError(
                f"closed after {timeout} s with a version not committed",
                hint="the store or a rank is slow or down; publish again",
            )
        self._flight.raise_untold()

    def _leave(self) -> None:
        if not self._left:
            self._left = True
            self._messenger.leave()

    def _stop(self) -> None:
        for pool in (self._helper, self._pools.compute, self._pools.transfer):
            pool.shutdown(wait=False)


def _all_one(streams: list[str]) -> str:
    """Refuse to go on where ranks have opened different streams, such as folders of their own hosts."""
    for rank, stream in enumerate(streams):
        if stream != streams[0]:
            raise UsageError(
                f"rank {rank} has opened stream {stream}, rank 0 {streams[0]}",
                hint="give all ranks the same root",
            )
    return ""


def _default_messenger() -> Messenger:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return TorchMessenger()
    return Alone()

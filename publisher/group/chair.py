"""What rank 0 knows beside its own share, and how it decides for all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from weightcast.manifest.chain import Position
from weightcast.manifest.commit import new_token
from weightcast.publisher.label import Label
from weightcast.publisher.upload import Uploader
from weightcast.schemas.digest import Digest
from weightcast.schemas.errors import Conflict, Corrupt, StorageError, UsageError, WeightcastError
from weightcast.schemas.layout import MIX
from weightcast.schemas.manifest import VersionManifest

from .commit import Relaid, prepare
from .meeting import Word
from .messenger import Messenger
from .plan import Plan, Replica, plan
from .tables import decode_table
from .words import Contribution, Decision, Division, Outcome, Ready, Status, division

_EQUAL: Final = "let all ranks have equal replicas, or publish the tensor from one of them"


@dataclass(frozen=True)
class Wish:
    """What rank 0 was asked to publish."""

    number: int
    label: Label
    drop: Collection[str]
    reset: bool
    wait: bool


@dataclass
class _Last:
    """The last publish that was to be committed: its number, its manifest once there is one, and whether that is in
    the store: None if it is not known."""

    number: int = 0
    manifest: VersionManifest | None = None
    committed: bool | None = False


class Chair:
    """Rank 0's decisions. Its methods are called by one thread at a time, while all ranks wait.

    Attributes:
        head: the newest version, as far as known.
        dead: why nothing more can be published, if so.
    """

    def __init__(
        self, uploader: Uploader, messenger: Messenger, head: Position | None, *, resume: bool
    ) -> None:
        self.head = head
        self.dead: Conflict | None = None
        self._uploader = uploader
        self._messenger = messenger
        self._goes_on = resume and head is not None  # whether the next version is told from the head
        self._last = _Last()
        self._plan: Plan | None = None
        self._unlisted: set[str] = set()  # second names that the plan's layout has from before
        self._identity = ""
        self._relaid: Relaid | None = None
        self._files: Mapping[str, bytes] | None = None  # given with a version that is not committed

    def open_turn(self, texts: Sequence[str], wish: Wish) -> Decision:
        """What is to be done, from how all ranks stand.

        Raises:
            Conflict: another publisher has taken over.
            StorageError: it is still not known whether the last version is committed.
        """
        found = [Status.model_validate_json(text) for text in texts]
        if any(status.busy for status in found):
            return Decision(do="wait" if wish.wait else "skip")
        self._messenger.settled()
        if self.dead is not None:
            raise self.dead
        self._settle()
        if wish.label.files is not None:
            self._files = wish.label.files
        fresh = wish.reset or not self._goes_on
        fits = all(status.plan == self._identity for status in found) and self._identity != ""
        fits = fits and (fresh or all(self._can_follow(status) for status in found))
        fits = fits and not (fresh and self._plan is not None and self._plan.layout.mix != MIX)
        fits = fits and not (self._unlisted if fresh else self._unlisted.intersection(wish.drop))
        last, head = self._last, self.head
        asked = any(status.open for status in found)
        committed = last.manifest.encode().decode() if asked and last.committed and last.manifest else ""
        return Decision(
            do="go" if fits else "plan",
            fresh=fresh,
            version=head.version + 1 if head is not None else 0,
            base=head.sha256 if head is not None else "",
            last=last.number,
            committed=committed,
        )

    def _can_follow(self, status: Status) -> bool:
        """Whether a rank's copy is of the head, or will be once it is told of the last version."""
        if self.head is None or status.base == self.head.sha256:
            return self.head is not None
        manifest = self._last.manifest
        return (
            bool(self._last.committed)
            and status.open == self._last.number
            and manifest is not None
            and manifest.parent is not None
            and manifest.parent.sha256 == status.base
        )

    def _settle(self) -> None:
        """Find out about a commit whose outcome was unknown."""
        if self._last.committed is None and self._last.manifest is not None:
            self._commit(self._last.manifest)

    def divide(self, texts: Sequence[str], wish: Wish, fresh: bool) -> Division:
        """A new plan, from all ranks' tables.

        Raises:
            UsageError: as `plan.plan`.
        """
        self._identity = ""
        tables = [decode_table(text, rank) for rank, text in enumerate(texts)]
        head = None if fresh else self.head
        before = self._uploader.reader.layout(head.manifest.layout) if head is not None else None
        self._plan = plan(tables, before, wish.drop)
        self._unlisted = {spec.name for spec in self._plan.layout}.difference(
            *({e.name for e in t} for t in tables)
        )
        self._relaid = None
        if before is None or self._plan.layout.sha256 != before.sha256:
            self._relaid = Relaid(self._plan.layout)
        text = head.manifest.encode().decode() if head is not None else ""
        return division(self._plan, tables, new_token(), text)

    @property
    def _replicas(self) -> tuple[Replica, ...]:
        return self._plan.replicas if self._plan is not None else ()

    def gone(self) -> list[str]:
        """Tensors of the head that the plan's layout does not carry over."""
        if self.head is None or self._relaid is None:
            return []
        before = self._uploader.reader.layout(self.head.manifest.layout).stored_by_name
        after = self._relaid.layout.stored_by_name
        return [name for name, spec in before.items() if after.get(name) != spec]

    def accept(self, texts: Sequence[str], told: Division, lost: Digest) -> str:
        """Prove that the ranks together hold the head, and that replicas are equal; then the plan holds.

        Raises:
            UsageError: replicas differ; names the tensor and the ranks.
            Corrupt: the ranks do not hold the head.
        """
        ready = [Ready.model_validate_json(text) for text in texts]
        for replica in self._replicas:
            _check_equal(replica, ready)
        if told.head and self.head is not None:
            found = sum((Digest.from_hex(r.digest) for r in ready), Digest())
            if found + lost != self.head.digest:
                raise Corrupt(
                    f"version {self.head.version} as the ranks rebuilt it has state {found + lost}, its manifest says "
                    f"{self.head.digest}"
                )
        if self._relaid is not None:
            self._relaid = Relaid(self._relaid.layout, lost)
        self._identity = told.plan
        return ""

    def commit(self, texts: Sequence[str], wish: Wish) -> Outcome:
        """Commit all ranks' parts.

        Raises:
            Conflict: another publisher committed that version.
            UsageError, Corrupt, StorageError: nothing was committed.
        """
        found = [Contribution.model_validate_json(text) for text in texts]
        self._check_replicas(found)
        parts = [contribution.part for contribution in found]
        self._last = _Last(wish.number)
        label = replace(wish.label, files=self._files)
        relaid = self._relaid
        if relaid is None and parts[0].base is None and self._plan is not None:
            relaid = Relaid(self._plan.layout)  # a part carries neither second names nor empty tensors
        manifest = prepare(self._uploader, parts, self.head, label, relaid)
        try:
            self._commit(manifest)
        except StorageError as error:
            return Outcome(unknown=Word.of(error))
        return Outcome(manifest=manifest.encode().decode())

    def _check_replicas(self, found: Sequence[Contribution]) -> None:
        first: dict[int, tuple[int, str]] = {}
        for rank, contribution in enumerate(found):
            for group, digest in contribution.replicas.items():
                other = first.setdefault(group, (rank, digest))
                if other[1] != digest:
                    self._identity = ""  # the next publish compares tensor by tensor
                    names = sorted({r.name for r in self._replicas if r.group == group})
                    raise UsageError(
                        f"not published, since ranks {other[0]} and {rank} hold the same parts of {len(names)} tensors "
                        f"(such as {names[0]!r}), but with other bits; the next publish says which",
                        hint=_EQUAL,
                    )

    def _commit(self, manifest: VersionManifest) -> None:
        self._last = _Last(self._last.number, manifest, None)
        try:
            self.head = self._uploader.commit(manifest)
        except WeightcastError as error:
            if not isinstance(error, StorageError):
                self._last.committed = False
            if isinstance(error, Conflict):
                self.dead = error
            raise
        self._last.committed = True
        self._goes_on = True
        self._relaid = self._files = None


def _check_equal(replica: Replica, ready: Sequence[Ready]) -> None:
    first, *others = ((rank, ready[rank].replicas[at]) for rank, at in replica.holders)
    for rank, digest in others:
        if digest != first[1]:
            raise UsageError(
                f"not published, since tensor {replica.name!r} has other bits on rank {rank} than on rank {first[0]}, "
                "and both hold the same part of it",
                hint=_EQUAL,
            )

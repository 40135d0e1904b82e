"""Texts between ranks, and steps that all take together."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from weightcast.publisher.group.meeting import Council
from weightcast.publisher.group.messenger import Alone, Silence
from weightcast.publisher.group.torch_messenger import TorchMessenger
from weightcast.schemas.errors import Corrupt, StorageError, UsageError, WeightcastError

from .kit import together


def pair(timeout_s: float = 30) -> tuple[dist.HashStore, list[TorchMessenger]]:
    """Two ranks and what lies between them."""
    keys = dist.HashStore()
    return keys, [TorchMessenger.over(keys, rank, 2, timeout_s) for rank in range(2)]


def test_texts_of_any_length_arrive_and_are_forgotten() -> None:
    keys, (zero, one) = pair()
    before = keys.num_keys()
    random.seed(0)
    long = "".join(random.choices("0123456789abcdef", k=12 << 20)) + "é"  # more than one value of the store
    for turn in range(3):
        one.gather(f"{turn}/a", long)
        assert zero.gather(f"{turn}/a", "") == ["", long]
        zero.broadcast(f"{turn}/b", long)
        assert one.broadcast(f"{turn}/b", None) == long
        assert keys.num_keys() > before
        one.gather(f"{turn}/c", "")
        zero.gather(f"{turn}/c", "")
        zero.broadcast(f"{turn}/d", "not read yet")
        zero.settled()
        assert keys.num_keys() == before + 2  # of the present topic
        assert one.broadcast(f"{turn}/d", None) == "not read yet"
        one.gather(f"{turn}/e", "")
        zero.gather(f"{turn}/e", "")
        zero.settled()
        assert keys.num_keys() == before + 1


def test_what_comes_too_late_is_forgotten_as_well() -> None:
    keys, (zero, one) = pair(0.1)
    with pytest.raises(Silence):
        zero.gather("a", "")
    one.gather("a", "late")
    assert keys.check([f"{zero._prefix}/a/1"])
    for topic in ("b", "c"):
        one.gather(topic, "")
        zero.gather(topic, "")
        zero.settled()
    assert not keys.check([f"{zero._prefix}/a/1"])


def test_two_threads_may_want_the_last_idle_connection() -> None:
    class Taken(list[Any]):
        """Has one, until somebody takes it."""

        def __bool__(self) -> bool:
            return True

    _, (zero, one) = pair()
    zero._idle = Taken()
    zero.broadcast("t", "said")
    assert one.broadcast("t", None) == "said"


def test_two_groups_of_the_same_ranks_do_not_hear_each_other() -> None:
    keys, (zero, one) = pair()
    zero2, one2 = (TorchMessenger.over(keys, rank, 2) for rank in range(2))
    zero.broadcast("t", "first")
    zero2.broadcast("t", "second")
    assert (one.broadcast("t", None), one2.broadcast("t", None)) == ("first", "second")


def test_silence_names_who_is_missing_and_the_late_one_still_hears() -> None:
    _, (zero, one) = pair(0.5)
    with pytest.raises(Silence, match=r"rank 1 of 2 did not come to t within 0\.4 s"):
        zero.gather("t", "")
    with pytest.raises(Silence, match=r"rank 0 of 2 did not decide about t within 0\.5 s"):
        one.broadcast("t", None)
    zero.broadcast("t", "said")
    assert one.broadcast("t", None) == "said"


def test_rank_0_leaves_last_but_waits_no_longer_than_a_moment() -> None:
    """Its process may keep the store, from which the others still have to hear what it said last."""
    _, (zero, one) = pair()
    left: list[str] = []

    def leave() -> None:
        zero.leave()
        left.append("zero")

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join(0.2)
    assert left == []
    one.leave()
    thread.join(1)
    assert left == ["zero"]
    _, (zero, one) = pair(0.1)
    one.leave()
    zero.leave()
    _, (zero, _) = pair(0.1)
    zero.leave()  # rank 1 never does


def test_a_store_that_is_gone_is_said_to_be() -> None:
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
    )
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    one = TorchMessenger.over(client, 1, 2, 5)
    del store
    with pytest.raises(Silence, match="store does not answer"):
        one.broadcast("t", None)


def test_a_store_that_does_not_answer_is_waited_for_as_long_as_a_rank() -> None:
    """As where its host is gone without a word: torch waits for ever."""

    class Hung:
        """Answers its first request alone."""

        def __init__(self) -> None:
            self.let_go = threading.Event()

        def add(self, key: str, amount: int, /) -> int:
            return 1

        def check(self, *_: Any) -> bool:
            return self.let_go.wait(60)

        set = get = delete_key = check

    keys: Any = Hung()
    one = TorchMessenger.over(keys, 1, 2, 0.2)
    begun = time.monotonic()
    with pytest.raises(Silence, match=r"does not answer: nothing for 0\.2 s"):
        one.broadcast("t", None)
    with pytest.raises(Silence, match=r"does not answer: nothing for 0\.2 s"):
        one.gather("t", "text")
    one.leave()
    assert time.monotonic() - begun < 20
    zero = TorchMessenger.over(keys, 0, 2, 60)
    begun = time.monotonic()
    zero.leave()
    assert time.monotonic() - begun < 20  # a goodbye is not worth the timeout
    keys.let_go.set()


def test_where_no_thread_is_to_be_had_nothing_is_heard_and_leaving_is_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    _, (_, one) = pair()
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(Silence, match="can't start new thread"):
        one.broadcast("t", None)
    one.leave()


def test_without_torch_distributed_there_is_no_messenger_but_one_rank() -> None:
    with pytest.raises(UsageError, match="not initialised"):
        TorchMessenger()
    alone = Alone()
    assert (alone.gather("t", "a"), alone.broadcast("t", "b")) == (["a"], "b")


def councils(timeout_s: float, pool: ThreadPoolExecutor) -> list[Council]:
    _, messengers = pair(timeout_s)
    return [Council(messenger, pool) for messenger in messengers]


def test_a_meeting_takes_as_long_as_work_and_decision_do() -> None:
    """Both are longer than the timeout: whoever works is not silent."""
    with ThreadPoolExecutor(4) as pool:
        both = councils(0.8, pool)

        def slowly(text: str) -> str:
            time.sleep(1.5)
            return text

        work: list[Future[str] | str] = ["quick", pool.submit(slowly, "slow")]
        found = together(
            [
                lambda r=rank: both[r].meet("t", work[r], lambda texts: slowly("+".join(texts)))
                for rank in range(2)
            ]
        )
    assert found == ["quick+slow"] * 2


@pytest.mark.parametrize("where", ["work", "odd", "decision"])
def test_an_error_is_the_same_on_all_ranks(where: str) -> None:
    def fail(error: Exception) -> str:
        raise error

    with ThreadPoolExecutor(4) as pool:
        both = councils(30, pool)
        error: Exception = Corrupt("bad", hint="do") if where != "odd" else ZeroDivisionError("odd")
        work: list[Future[str] | str] = ["fine", "fine" if where == "decision" else pool.submit(fail, error)]
        decide = (lambda _: fail(error)) if where == "decision" else (lambda _: "fine")
        found = together([lambda r=rank: both[r].meet("t", work[r], decide) for rank in range(2)])
    expected = {"work": "rank 1: bad (do)", "odd": "rank 1: ZeroDivisionError: odd", "decision": "bad (do)"}[
        where
    ]
    assert [str(f) for f in found] == [expected] * 2
    assert {type(f) for f in found} == ({WeightcastError} if where == "odd" else {Corrupt})


def test_rank_0_goes_on_only_after_its_decision_even_if_it_can_tell_nobody() -> None:
    class Lost(Alone):
        """Says nothing to anybody."""

        timeout_s = 0.2

        def broadcast(self, topic: str, text: str | None) -> str:
            raise Silence("gone")

    decided = []

    def slowly(texts: list[str]) -> str:
        time.sleep(0.4)
        decided.extend(texts)
        return ""

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(Silence):
            Council(Lost(), pool).meet("t", "a", slowly)
        assert decided == ["a"]


def test_a_rank_that_does_not_come_is_an_error_for_the_others() -> None:
    with ThreadPoolExecutor(4) as pool:
        zero, one = councils(0.5, pool)
        with pytest.raises(StorageError, match="rank 1 of 2 did not come"):
            zero.meet("t", "", lambda _: "")
        with pytest.raises(StorageError, match="rank 1 of 2 did not come"):
            one.meet("t", "late", lambda _: "")

"""Streams that an older release began keep their digest (mix 1) until a reset, whoever goes on with them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping

import pytest
import torch

from weightcast.manifest.inspect.verify import verify
from weightcast.manifest.store import open_store
from weightcast.manifest.stream import StreamReader
from weightcast.publisher import Publisher
from weightcast.publisher.group import PartWriter, commit_parts
from weightcast.schemas.manifest import VersionManifest
from weightcast.schemas.settings import PublisherSettings
from weightcast.subscriber import Subscriber, SubscriberSettings, Tensors

from ..codings import trained, weights
from ..faultstore import FaultStore
from .older import as_an_older_release, mix_of

At = Callable[..., Publisher]


def check_follows(
    subscriber: Subscriber, held: Mapping[str, torch.Tensor], model: Mapping[str, torch.Tensor]
) -> None:
    subscriber.once()
    for name, tensor in model.items():
        assert torch.equal(held[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_a_publisher(store: FaultStore, publisher_at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    model = weights()
    with monkeypatch.context() as patch:
        as_an_older_release(patch)
        first = publisher_at()
        assert mix_of(store, first.publish(model).wait()) == 1
        first.close()
    held = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    publisher = publisher_at()
    with Subscriber("", Tensors(held), SubscriberSettings(threads=1), store=store) as subscriber:
        check_follows(subscriber, held, model)
        for codec, reset, expected in [
            ("gap", False, 1),
            ("class", False, 1),
            ("gap", True, 2),
            ("class", False, 2),
        ]:
            publisher.close()
            publisher = publisher_at(codec=codec)
            model = trained(model, len(codec) + expected)
            assert mix_of(store, publisher.publish(model, reset=reset).wait()) == expected
            check_follows(subscriber, held, model)
    assert verify(StreamReader.open(store), deep=True).ok


def test_a_publisher_whose_layout_changes(
    store: FaultStore, publisher_at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = weights()
    with monkeypatch.context() as patch:
        as_an_older_release(patch)
        publisher_at().publish(model).wait()
    publisher = publisher_at()
    assert mix_of(store, publisher.publish({**model, "more": torch.ones(5)}).wait()) == 1
    assert verify(StreamReader.open(store), deep=True).ok


def test_parts_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FaultStore(open_store(f"memory://{uuid.uuid4().hex}"))
    model = weights()
    settings = PublisherSettings(threads=1)

    def commit(writer: PartWriter, **options: bool) -> VersionManifest:
        return commit_parts("", [writer.stage(model, **options)], store=store)

    with PartWriter("", 0, 1, settings, store=store) as writer:
        with monkeypatch.context() as patch:
            as_an_older_release(patch)
            assert mix_of(store, commit(writer)) == 1
        model = trained(model, 1)
        assert mix_of(store, commit(writer)) == 1  # by the writer that began it
        with PartWriter("", 0, 1, settings, store=store) as other:
            model = trained(model, 2)
            assert mix_of(store, commit(other)) == 1
            assert mix_of(store, commit(other, reset=True)) == 2  # with a copy of mix 1
            model = trained(model, 3)
            assert mix_of(store, commit(other)) == 2
    assert verify(StreamReader.open(store), deep=True).ok

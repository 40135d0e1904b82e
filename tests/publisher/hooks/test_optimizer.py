"""The hook on torch optimizers, with torch itself."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from weightcast.publisher import Publisher
from weightcast.publisher.hooks.optimizer import OptimizerHook
from weightcast.schemas.errors import UsageError

from .kit import assert_same_bits, copied, followed, reader_at, versions


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).to(torch.bfloat16)


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.randn(4, 8, dtype=torch.bfloat16)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.SGD,
        partial(torch.optim.AdamW, foreach=False),
        partial(torch.optim.AdamW, foreach=True),
        partial(torch.optim.AdamW, fused=True),
    ],
)
def test_a_version_a_step_and_its_bits(make: type[torch.optim.SGD], root: str) -> None:
    net = model()
    optimizer = make(net.parameters(), lr=0.1)
    with OptimizerHook(optimizer, net, root, metadata=lambda: {"lr": 0.1}) as hook:
        for step in range(1, 4):
            train(net, optimizer)
            stamp = hook.stamp()
            assert stamp is not None
            assert stamp.step == step
            assert_same_bits(followed(root, net.state_dict()), net.state_dict())
    assert [v.step for v in versions(root)] == [1, 2, 3]
    assert reader_at(root).manifest(2).metadata == {"lr": 0.1}


def test_every_third_step_from_a_resumed_one(root: str) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with OptimizerHook(optimizer, net, root, every=3, step=100) as hook:
        hook.publish()  # what the run starts from
        states = {100: copied(net.state_dict())}
        for step in range(101, 107):
            train(net, optimizer)
            states[step] = copied(net.state_dict())
        hook.stamp()
    assert versions(root)[0].step == 100
    assert versions(root)[-1].step == 105
    assert {v.step for v in versions(root)} <= {100, 102, 105}  # 102 may have coalesced with 105
    assert_same_bits(followed(root, net.state_dict()), states[105])


def test_nothing_is_published_after_close_and_a_given_publisher_stays_open(root: str) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Publisher(root) as publisher:
        hook = OptimizerHook(optimizer, net, publisher)
        train(net, optimizer)
        hook.close()
        assert publisher.version == 0  # closing waited for it
        train(net, optimizer)
        assert publisher.wait_idle(10)
        assert publisher.version == 0
        publisher.publish(net.state_dict()).wait()
    assert len(versions(root)) == 2


class Marked(torch.nn.Parameter):
    """A parameter that can carry the marks of frameworks that shard."""


@pytest.mark.parametrize(
    ("mark", "said"), [("ds_id", "partitioned by ZeRO-3"), ("_fsdp_flattened", "flattened by FSDP1")]
)
def test_a_marked_shard_is_refused(mark: str, said: str, root: str) -> None:
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.weight = Marked(torch.zeros(0))
    setattr(net.weight, mark, True)
    with pytest.raises(UsageError, match=f"'weight' is {said}"):
        OptimizerHook(optimizer, net, root)


def test_a_model_on_the_meta_device_is_refused(root: str) -> None:
    net = torch.nn.Linear(4, 4, device="meta")
    with pytest.raises(UsageError, match="'weight' is on meta"):
        OptimizerHook(torch.optim.SGD(net.parameters(), lr=0.1), net, root)


def test_every_must_be_a_step(root: str) -> None:
    net = model()
    with pytest.raises(UsageError, match="every is 0"):
        OptimizerHook(torch.optim.SGD(net.parameters(), lr=0.1), net, root, every=0)

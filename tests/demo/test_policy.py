"""The policy has a checkpoint's names, and samples from the distribution it reports."""

from __future__ import annotations

import pytest
import torch

from weightcast.demo.learner import Learner
from weightcast.demo.policy import Policy, PolicyConfig, inference_copy
from weightcast.schemas.errors import UsageError


def test_tensor_names_are_those_of_a_checkpoint_with_a_tied_head(config: PolicyConfig) -> None:
    state = Policy(config).state_dict()
    layer = "model.layers.1."
    assert {name.removeprefix(layer) for name in state if name.startswith(layer)} == {
        "input_layernorm.weight",
        "self_attn.q_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
        "self_attn.o_proj.weight",
        "post_attention_layernorm.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    }
    outside = {name for name in state if not name.startswith("model.layers.")}
    assert outside == {"model.embed_tokens.weight", "model.embed_positions.weight", "model.norm.weight"}


def test_writing_into_the_state_dict_changes_the_live_copy(config: PolicyConfig) -> None:
    actor, tokens = inference_copy(config), torch.tensor([[1, 2, 4]])
    source = Learner(config, seed=9)
    for name, weights in actor.state_dict().items():
        weights.copy_(source.bf16_state()[name])
    expected = Policy(config, seed=9).to(torch.bfloat16)(tokens)
    assert torch.equal(actor(tokens), expected)


def test_generate_reports_the_logprobs_of_what_it_sampled(config: PolicyConfig) -> None:
    policy, prompts = Policy(config).requires_grad_(False), torch.tensor([[0, 1, 4], [3, 2, 4]])
    made = policy.generate(prompts, 2, rng=torch.Generator().manual_seed(2), temperature=0.7)
    again = policy.answer_logprobs(torch.cat([prompts, made.tokens], 1), 3, temperature=0.7)
    assert made.tokens.shape == (2, 2)
    torch.testing.assert_close(made.logprobs, again)


def test_sampling_follows_the_distribution(config: PolicyConfig) -> None:
    policy = inference_copy(config)
    prompt = torch.tensor([[0, 1, 4]])
    chances = torch.softmax(policy(prompt)[0, -1], dim=-1)
    drawn = policy.generate(prompt.expand(20_000, -1), 1, rng=torch.Generator().manual_seed(6)).tokens
    found = torch.bincount(drawn.flatten(), minlength=config.vocab_size) / 20_000
    assert (found - chances).abs().max() < 0.02  # five standard errors of a fraction of one half


def test_an_earlier_token_does_not_see_later_ones(config: PolicyConfig) -> None:
    policy = Policy(config)
    first, second = (policy(torch.tensor([[0, 1, 4, last]])) for last in (2, 3))
    assert torch.equal(first[:, :3], second[:, :3])
    assert not torch.equal(first[:, 3], second[:, 3])


def test_too_long_and_too_cold_are_refused(config: PolicyConfig) -> None:
    policy, prompt = Policy(config), torch.tensor([[0, 1, 4]])
    with pytest.raises(UsageError, match="6 tokens, the policy has 5 positions"):
        policy.generate(prompt, 3, rng=torch.Generator())
    with pytest.raises(UsageError, match="temperature"):
        policy.generate(prompt, 1, rng=torch.Generator(), temperature=0.0)


def test_a_configuration_that_cannot_be_built_is_refused() -> None:
    with pytest.raises(UsageError, match="no multiple"):
        PolicyConfig(vocab_size=4, max_positions=4, width=10, heads=4)
    with pytest.raises(UsageError, match="layers is 0"):
        PolicyConfig(vocab_size=4, max_positions=4, layers=0)

"""A small decoder-only transformer with the tensor names of a Llama checkpoint.

One class serves both sides: the learner runs it with fp32 masters, a rollout process with its own bf16 copy.
The output head is tied to `model.embed_tokens.weight`, so it has no tensor of its own.

Letters in shape comments: B sequences, P prompt positions, A answer positions, T = P + A, D width, H heads,
K head width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from weightcast.schemas.errors import UsageError


@dataclass(frozen=True)
class PolicyConfig:
    """Sizes of a policy; both sides of a stream must use the same ones.

    Attributes:
        vocab_size: number of token ids.
        max_positions: longest sequence, in tokens, prompt and answer together.
        width: size of the residual stream; a multiple of `heads`.
        layers: number of decoder blocks.
        heads: number of attention heads.
        mlp_width: size of the gated hidden layer.
        init_scale: standard deviation of embeddings and, in units of 1/sqrt(fan-in), of other matrices.
            Larger weights let an optimizer step of the same size cross fewer bf16 rounding boundaries.
    """

    vocab_size: int
    max_positions: int
    width: int = 256
    layers: int = 2
    heads: int = 4
    mlp_width: int = 512
    init_scale: float = 2.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_positions", "width", "layers", "heads", "mlp_width", "init_scale"):
            if getattr(self, name) <= 0:
                raise UsageError(f"policy {name} is {getattr(self, name)}, it must be positive")
        if self.width % self.heads:
            raise UsageError(f"policy width {self.width} is no multiple of its {self.heads} heads")


@dataclass(frozen=True)
class Generation:
    """What `Policy.generate` sampled.

    Attributes:
        tokens: int64 [B, A], the sampled token ids.
        logprobs: fp32 [B, A], the log-probability of each token under the distribution it was drawn from.
    """

    tokens: Tensor
    logprobs: Tensor


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 whatever the input's dtype, as Llama does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return the normed input, [..., D], in the input's dtype."""
        wide = hidden_BTD.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)  # 1e-6: Llama's rms_norm_eps
        return self.weight * (wide * scale).to(hidden_BTD.dtype)


class Attention(nn.Module):
    """Causal multi-head attention without biases."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, config.width, bias=False)
        self.v_proj = nn.Linear(config.width, config.width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return the attention output, [B, T, D]."""
        query, key, value = (
            project(hidden_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, T, K]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed_BHTK = scaled_dot_product_attention(query, key, value, is_causal=True)
        projected_BTD: Tensor = self.o_proj(mixed_BHTK.transpose(1, 2).flatten(-2))
        return projected_BTD


class GatedMLP(nn.Module):
    """Llama's feed-forward block: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.mlp_width, bias=False)
        self.up_proj = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down_proj = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return the block's output, [B, T, D]."""
        down_BTD: Tensor = self.down_proj(silu(self.gate_proj(hidden_BTD)) * self.up_proj(hidden_BTD))
        return down_BTD


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.width)
        self.mlp = GatedMLP(config)

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Return the residual stream after this layer, [B, T, D]."""
        attended_BTD: Tensor = hidden_BTD + self.self_attn(self.input_layernorm(hidden_BTD))
        thought_BTD: Tensor = self.mlp(self.post_attention_layernorm(attended_BTD))
        return attended_BTD + thought_BTD


class Decoder(nn.Module):
    """Everything under the `model.` prefix of the checkpoint."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.embed_positions = nn.Embedding(config.max_positions, config.width)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the normed residual stream, [B, T, D]."""
        positions_T = torch.arange(tokens_BT.shape[1])
        hidden_BTD = self.embed_tokens(tokens_BT) + self.embed_positions(positions_T)
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD)
        normed_BTD: Tensor = self.norm(hidden_BTD)
        return normed_BTD


class Policy(nn.Module):
    """The policy: token ids in, next-token logits out."""

    def __init__(self, config: PolicyConfig, *, seed: int = 0) -> None:
        """Create a randomly initialised fp32 policy; the same config and seed give the same bits."""
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self._initialise(torch.Generator().manual_seed(seed))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return fp32 next-token logits [B, T, V] for int64 tokens [B, T]."""
        hidden_BTD = self.model(tokens_BT)
        logits_BTV: Tensor = linear(hidden_BTD, self.model.embed_tokens.weight).float()
        return logits_BTV * float(self.config.width**-0.5)  # so the random policy is near uniform

    def answer_logprobs(self, tokens_BT: Tensor, prompt_length: int, *, temperature: float = 1.0) -> Tensor:
        """Return the fp32 log-probabilities [B, A] of the tokens after the first `prompt_length`."""
        logits_BTV: Tensor = self(tokens_BT[:, :-1])
        logits_BAV = logits_BTV[:, prompt_length - 1 :] / temperature
        answers_BA1 = tokens_BT[:, prompt_length:, None]
        logprobs_BA: Tensor = torch.log_softmax(logits_BAV, dim=-1).gather(-1, answers_BA1).squeeze(-1)
        return logprobs_BA

    @torch.no_grad()
    def generate(
        self, prompts_BP: Tensor, length: int, *, rng: torch.Generator, temperature: float = 1.0
    ) -> Generation:
        """Sample `length` tokens after each prompt.

        There is no KV cache: with a dozen positions, computing the prefix again costs less than keeping one.

        Args:
            prompts_BP: int64 [B, P], all of the same length.
            length: number of tokens to sample, A.
            rng: source of all randomness; advanced by the call.
            temperature: divides the logits; the log-probabilities are those of the divided ones.

        Raises:
            UsageError: prompt and answer do not fit the positions, or the temperature is not positive.
        """
        total, limit = prompts_BP.shape[1] + length, self.config.max_positions
        if total > limit:
            raise UsageError(f"prompt and answer have {total} tokens, the policy has {limit} positions")
        if temperature <= 0:
            raise UsageError(f"sampling temperature is {temperature}, it must be positive")
        sequence_BT, chosen = prompts_BP, []
        for _ in range(length):
            logprobs_BV = torch.log_softmax(self(sequence_BT)[:, -1] / temperature, dim=-1)
            next_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=rng)
            chosen.append(logprobs_BV.gather(1, next_B1))
            sequence_BT = torch.cat([sequence_BT, next_B1], dim=1)
        return Generation(tokens=sequence_BT[:, prompts_BP.shape[1] :], logprobs=torch.cat(chosen, dim=1))

    def _initialise(self, rng: torch.Generator) -> None:
        """Fill every matrix from `rng`; norms stay at one."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            fan_in = 1 if "embed" in name else parameter.shape[1]
            with torch.no_grad():
                parameter.normal_(0.0, self.config.init_scale * fan_in**-0.5, generator=rng)


def inference_copy(config: PolicyConfig) -> Policy:
    """Return a bf16 policy without gradients for a rollout process; its weights are there to be overwritten.

    The tensors of its `state_dict()` are the live weights: writing into them changes what it generates.
    """
    return Policy(config).to(torch.bfloat16).requires_grad_(False).eval()

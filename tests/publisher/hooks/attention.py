"""FlashAttention, the one attention that TRL's asynchronous GRPO has, in plain torch for a CPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


class Attention:
    """The module that TRL imports, as far as it uses it."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, *_: Any, softmax_scale: float, **__: Any
    ) -> Any:
        """Causal attention within sequences of several lengths, laid end to end."""
        outputs = []
        for (a, b), (c, d) in zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True):
            query, key, value = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
            seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(diagonal=(d - c) - (b - a))
            out = scaled_dot_product_attention(
                query, key, value, attn_mask=seen, scale=softmax_scale, enable_gqa=True
            )
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)

"""Turn the projections inside `nn.MultiheadAttention` into layers that can be recorded.

Torch computes attention in one fused function, in which no module is called and the three
input projections are one packed parameter. Within `explicit_attention`, every such module
runs step by step through its `out_proj` and through a child `in_proj` with the packed weight,
and computes the same; afterwards it is as it was.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from relflat_sk._network.forwards import ReplacedForwards, has_own_forward

__all__ = ["InProjection", "explicit_attention"]


class InProjection(nn.Linear):
    """The packed projections of queries, keys and values, as one linear layer."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        nn.Module.__init__(self)
        self.training = attention.training
        self.in_features = attention.embed_dim
        self.out_features = 3 * attention.embed_dim
        self.weight = attention.in_proj_weight
        self.bias = attention.in_proj_bias


@contextmanager
def explicit_attention(module: nn.Module) -> Iterator[None]:
    """Run all attention inside a network step by step, with `in_proj` as a child layer.

    In cross-attention `in_proj` projects queries, keys and values all together, as positions of
    one sequence; the projections that are not needed are dropped afterwards. So the packed
    weight has one input, and the loss depends on it as before. Modules with extra options
    (other sizes of keys and values, added keys) are left alone.
    """
    found = [m for m in module.modules() if isinstance(m, nn.MultiheadAttention)]
    found = [m for m in found if _has_usual_options(m)]
    # otherwise whole encoder layers are fused in evaluation mode
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for attention in found:
            attention._modules["in_proj"] = InProjection(attention)
        with ReplacedForwards((attention, partial(_attend, attention)) for attention in found):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for attention in found:
            attention._modules.pop("in_proj", None)


def _has_usual_options(attention: nn.MultiheadAttention) -> bool:
    """Return whether `_attend` computes the same as the module."""
    return (
        attention._qkv_same_embed_dim
        and attention.bias_k is None
        and not attention.add_zero_attn
        and not has_own_forward(attention)
    )


def _attend(
    attention: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute scaled dot-product attention, with the arguments of `nn.MultiheadAttention`."""
    if query.ndim != 3:
        return nn.MultiheadAttention.forward(
            attention,
            query,
            key,
            value,
            key_padding_mask,
            need_weights,
            attn_mask,
            average_attn_weights,
            is_causal,
        )
    q, k, v = _project(attention, query, key, value)
    n, heads, length, size = q.shape
    scores = q @ k.transpose(-2, -1) / math.sqrt(size)
    if attn_mask is not None:
        full = attn_mask if attn_mask.ndim == 2 else attn_mask.view(n, heads, *attn_mask.shape[1:])
        scores = scores + _additive(full, scores)
    if key_padding_mask is not None:
        scores = scores + _additive(key_padding_mask, scores)[:, None, None, :]
    weights = F.dropout(scores.softmax(dim=-1), attention.dropout, attention.training)
    mixed = (weights @ v).transpose(1, 2).reshape(n, length, heads * size)
    out = attention.out_proj(mixed)
    if not attention.batch_first:
        out = out.transpose(0, 1)
    if not need_weights:
        return out, None
    return out, weights.mean(dim=1) if average_attn_weights else weights


def _project(attention: Any, *inputs: Tensor) -> list[Tensor]:
    """Compute queries, keys and values of each head: (n, heads, length, size of a head)."""
    same_as = [next(j for j, x in enumerate(inputs) if x is one) for one in inputs]
    distinct = {j: inputs[j] for j in dict.fromkeys(same_as)}
    if not attention.batch_first:
        distinct = {j: x.transpose(0, 1) for j, x in distinct.items()}
    lengths = [x.shape[1] for x in distinct.values()]
    sequence = torch.cat(list(distinct.values()), dim=1) if len(distinct) > 1 else distinct[0]
    heads = attention.num_heads
    projected = attention.in_proj(sequence)
    projected = projected.view(*sequence.shape[:2], 3, heads, attention.embed_dim // heads)
    parts = dict(zip(distinct, projected.split(lengths, dim=1), strict=True))
    return [parts[j][:, :, which].transpose(1, 2) for which, j in enumerate(same_as)]


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """Turn a boolean mask into numbers to add to scores; other masks are numbers already."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)

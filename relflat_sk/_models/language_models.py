"""Causal language models of Hugging Face's transformers, which bring their own loss."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from relflat_sk._network import Batch, Batches

__all__ = ["IGNORED", "is_causal_language_model", "next_labels", "next_tokens"]

IGNORED = -100  # the label of tokens that do not count, in torch and in transformers


def is_causal_language_model(module: nn.Module) -> bool:
    """Recognise a causal language model of transformers and its loss without importing it."""
    name = type(module).__name__
    if not (name.endswith(("ForCausalLM", "LMHeadModel")) and hasattr(module, "config")):
        return False
    loss = getattr(module, "loss_function", None)
    return getattr(loss, "__name__", "") == "ForCausalLMLoss"


def next_tokens(batches: Batches) -> Batches:
    """Replace the labels of each token by those of the next one, as transformers does."""

    def shifted() -> Iterator[Batch]:
        for batch in batches():
            yield replace(batch, y=next_labels(batch.y))

    return shifted


def next_labels(labels: Tensor | None) -> Tensor:
    """Shift labels so that each token has the next one's.

    Shapes: `labels` (samples, tokens); returns (samples, tokens).
    """
    if labels is None or labels.ndim != 2:
        raise ValueError(
            "a causal language model is measured with labels of shape (samples, tokens) as y, got "
            f"{'none' if labels is None else tuple(labels.shape)}. Pass the input_ids as y, with "
            f"{IGNORED} for padding: as in transformers, each token is compared with the next."
        )
    last = torch.full_like(labels[:, :1], IGNORED)
    return torch.cat([labels[:, 1:], last], dim=1)

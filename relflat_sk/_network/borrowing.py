"""Borrow a network for measuring, and give it back as it was."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.amp import is_autocast_available

from relflat_sk._network.attention import explicit_attention
from relflat_sk._numerics import without_autocast
from relflat_sk._random import fork_rng

__all__ = ["borrowed"]


@contextmanager
def borrowed(module: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode, and give it back bit by bit as it was.

    Train/eval mode of every submodule, buffers and the random state come back, also after
    an exception. Inside the context the caller's `torch.autocast` is off, so that the network
    computes in its own precision, and attention runs step by step, see
    `relflat_sk._network.attention`.

    Parameters
    ----------
    module : nn.Module
        The network.

    Yields
    ------
    None
    """
    device = next((p.device for p in module.parameters() if p.is_cuda), None)
    with (
        torch.inference_mode(False),
        fork_rng(device),
        _autocast_off(module),
        _evaluation_mode(module),
        explicit_attention(module),
    ):
        yield


@contextmanager
def _autocast_off(module: nn.Module) -> Iterator[None]:
    """Turn mixed precision off on the devices of a network, and on the CPU, where sums are made."""
    tensors = [torch.empty(0, device="cpu"), *module.parameters(), *module.buffers()]
    on_each = {t.device.type: t for t in tensors if is_autocast_available(t.device.type)}
    with ExitStack() as stack:
        for tensor in on_each.values():
            stack.enter_context(without_autocast(tensor))
        yield


@contextmanager
def _evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode, and restore modes and buffers."""
    modes = [(m, m.training) for m in module.modules()]
    buffers = [(m, key, b) for m in module.modules() for key, b in m._buffers.items()]
    contents = [(b, b._version, b.clone()) for _, _, b in buffers if b is not None]
    try:
        module.eval()
        yield
    finally:
        for m, mode in modes:
            m.training = mode
        for m, key, buffer in buffers:
            m._buffers[key] = buffer
        for buffer, version, content in contents:
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(content)

"""Borrow a network for measuring, and give it back as it was."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.amp import is_autocast_available

from relflat_sk._network.attention import explicit_attention
from relflat_sk._random import fork_rng

__all__ = ["autocast_off", "borrowed"]


@contextmanager
def borrowed(module: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode, and give it back bit by bit as it was.

    Train/eval mode of every submodule, buffers and the random state come back, also after
    an exception. Inside the context the caller's `torch.autocast` is off, so that the network
    computes in its own precision, and attention runs step by step, see
    `relflat_sk._network.attention`.
    """
    device = next((p.device for p in module.parameters() if p.is_cuda), None)
    with (
        torch.inference_mode(False),
        fork_rng(device),
        autocast_off(*module.parameters(), *module.buffers()),
        _evaluation_mode(module),
        explicit_attention(module),
    ):
        yield


@contextmanager
def autocast_off(*tensors: Tensor) -> Iterator[None]:
    """Turn mixed precision off on the CPU, where sums are made, and on the accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu", *(tensor.device.type for tensor in tensors)}
    kinds |= set() if accelerator is None else {accelerator.type}
    with ExitStack() as stack:
        for kind in kinds:
            if is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
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

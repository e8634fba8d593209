"""Run `torch.nn.functional.scaled_dot_product_attention` so that it can be differentiated twice.

Torch computes it in fused kernels without a second derivative, on CPUs and GPUs. The kernel made of
matrix products has all derivatives; it holds the attention weights of all pairs of tokens in
memory.
"""

from collections.abc import Callable
from threading import Lock
from typing import Any

from torch.backends import cuda

__all__ = ["MathAttention"]

# how to read and to set whether torch may use a kernel, also on the CPU, and whether it should
_KERNELS: tuple[tuple[Callable[[], bool], Callable[[bool], Any], bool], ...] = (
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, False),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, False),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp, True),
)


class MathAttention:
    """Context in which attention runs in the kernel that has all derivatives.

    It makes the choice that `torch.nn.attention.sdpa_kernel` makes, in a fifth of the time, which
    counts in training steps. The choice is torch's global state: with several contexts open at a
    time, in threads for example, the last one to end restores it.
    """

    _lock = Lock()
    _n_open = 0
    _before: tuple[bool, ...] = ()

    def __init__(self) -> None:
        self._is_open = False

    def __enter__(self) -> None:
        """Choose the kernel; do nothing if the context is open already."""
        if self._is_open:
            return
        self._is_open, shared = True, MathAttention
        with shared._lock:
            shared._n_open += 1
            if shared._n_open == 1:
                shared._before = tuple(is_enabled() for is_enabled, _, _ in _KERNELS)
                for _, enable, wanted in _KERNELS:
                    enable(wanted)

    def __exit__(self, *error: object) -> None:
        """Restore the choice; do nothing if the context is not open."""
        if not self._is_open:
            return
        self._is_open, shared = False, MathAttention
        with shared._lock:
            shared._n_open -= 1
            if shared._n_open == 0:
                for (_, enable, _), was_enabled in zip(_KERNELS, shared._before, strict=True):
                    enable(was_enabled)

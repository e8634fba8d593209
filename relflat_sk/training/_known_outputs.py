"""Let a net predict from outputs that are known already."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from skorch.utils import to_device
from torch import Tensor

__all__ = ["known_outputs"]


@contextmanager
def known_outputs(net: Any, outputs: Tensor) -> Iterator[None]:
    """Let a net predict from outputs that its module has computed already."""

    def forward_iter(X: Any, training: bool = False, device: str = "cpu") -> Iterator[Any]:
        yield to_device(outputs, device=device)

    net.__dict__["forward_iter"] = forward_iter
    try:
        yield
    finally:
        del net.__dict__["forward_iter"]

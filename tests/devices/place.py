"""The device that is compared with the CPU: simulated, or a real one.

The variable names the real one: ``RELFLAT_SK_TEST_DEVICE=cuda python -m pytest
tests/devices/values.py tests/devices/trainings.py``.
"""

import os
from contextlib import contextmanager
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from tests.devices.networks import GeneratorOfTheCPU

__all__ = ["DEVICE", "IS_SIMULATED", "other_device"]

VARIABLE = "RELFLAT_SK_TEST_DEVICE"
IS_SIMULATED = VARIABLE not in os.environ
RANDOM = {torch.rand, torch.randint, torch.randn, torch.randperm}


class DrawsOfTheCPU(TorchFunctionMode):
    """Draw random numbers on the CPU: other devices draw other numbers from the same seed."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device = kwargs.pop("device", None) if func in RANDOM else None
        drawn = func(*args, **kwargs)
        return drawn if device is None else drawn.to(device)


@contextmanager
def real_device():
    """Draw the CPU's random numbers, and compute in full float32 as it does."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        with mock.patch.object(torch, "Generator", GeneratorOfTheCPU), DrawsOfTheCPU():
            yield DEVICE
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


if IS_SIMULATED:
    # only here, since its import teaches torch the device
    from tests.devices.simulated import DEVICE
    from tests.devices.simulated import simulated_device as other_device
else:
    # tensors name their device by its number
    DEVICE, other_device = torch.empty(0, device=os.environ[VARIABLE]).device, real_device

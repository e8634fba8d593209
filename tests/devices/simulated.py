"""A device that is not the CPU, simulated on the CPU, for machines without an accelerator.

Inside `simulated_device()`, torch knows the device type "sim". Tensors on it hold a CPU tensor and
run every operation there, so that values are the CPU's. Operations that mix them with CPU tensors
(other than numbers) raise an error, as on CUDA. `count()` counts operations and waits.

Limits of the simulation:

- no forward-mode derivatives (`torch.autograd.forward_ad`), no streams, no autocast
- `torch.Generator(device="sim")` is a generator of the CPU
- no indexing by numpy arrays together with an ellipsis, which scikit-learn uses for rows
"""

import traceback
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from unittest import mock

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.devices.networks import GeneratorOfTheCPU

__all__ = ["DEVICE", "Counts", "active_counts", "count", "simulated_device"]

_setup_privateuseone_for_python_backend("sim")
DEVICE = torch.device("sim:0")

# operations that take CPU indices on CUDA, too, or move data
_MAY_MIX = {"aten::copy_", "aten::index", "aten::index_put_", "aten::_index_put_impl_"}
_SCALARS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero"}
# operations whose result the host needs, or whose shape depends on values
_WAITS = _SCALARS | {"aten::nonzero"}
# operations that compute nothing: on a GPU they start no kernel
_VIEWS = {
    f"aten::{name}"
    for name in ("alias", "detach", "expand", "permute", "reshape", "select", "slice", "squeeze",
                 "squeeze_", "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view",
                 "empty", "empty_like", "empty_strided", "new_empty")
}  # fmt: skip


@dataclass
class Counts:
    operations: Counter = field(default_factory=Counter)  # those that start a kernel on a GPU
    waits: Counter = field(default_factory=Counter)  # lines of code at which the host waited

    @property
    def n_operations(self):
        return sum(self.operations.values())

    @property
    def n_waits(self):
        return sum(self.waits.values())


_active = []


def active_counts():
    return _active


@contextmanager
def count():
    """Count operations and waits inside the context."""
    counts = Counts()
    _active.append(counts)
    try:
        yield counts
    finally:
        _active.remove(counts)


@contextmanager
def simulated_device():
    """Let torch make generators and identity matrices on the simulated device."""
    with (
        mock.patch.object(torch, "Generator", GeneratorOfTheCPU),
        mock.patch.object(torch, "eye", _eye_of(torch.eye)),
    ):
        yield DEVICE


class SimTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, data, requires_grad=False):
        options = {"dtype": data.dtype, "device": DEVICE, "requires_grad": requires_grad}
        options |= {"strides": data.stride(), "storage_offset": data.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(cls, data.size(), **options)
        made.data_ = data
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _eye_of(eye):
    """`torch.eye` fills an empty tensor, and a wrapper does not show the new shape."""

    def simulated(*size, device=None, **options):
        if device is None or torch.device(device).type != DEVICE.type:
            return eye(*size, device=device, **options)
        return SimTensor(eye(*size, **options))

    return simulated


def _line():
    frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename]
    frame = [f for f in frames if f.filename != __file__][-1]
    return f"{frame.filename}:{frame.lineno}"


def _wrap(value):
    plain = isinstance(value, torch.Tensor) and not isinstance(value, SimTensor)
    return SimTensor(value) if plain else value


def _unwrap(value):
    return value.data_ if isinstance(value, SimTensor) else value


def _map(change, value):
    """Change all values in the arguments or results of an operation, which nest lists only."""
    # as `torch.utils._pytree.tree_map` does for everything, in three times the time
    if isinstance(value, list | tuple):
        return type(value)(_map(change, part) for part in value)
    return change(value)


def _tensors(values):
    found = []
    _map(lambda value: found.append(value) if isinstance(value, torch.Tensor) else None, values)
    return found


def _record(name, waits):
    for counts in _active:
        if name not in _VIEWS | _SCALARS:
            counts.operations[name] += 1
        if waits:
            counts.waits[_line()] += 1


@cache
def _returns_written(func):
    """Whether an operation returns the tensors that it changes."""
    return any(r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns)


def _run(func, args, kwargs):
    name = func._schema.name
    tensors = _tensors((*args, *kwargs.values()))
    simulated = [t for t in tensors if isinstance(t, SimTensor)]
    numbers_mix = not name.startswith("aten::_fused_")  # not the numbers of steps
    others = [
        t for t in tensors if not isinstance(t, SimTensor) and not (numbers_mix and t.dim() == 0)
    ]
    if simulated and others and name not in _MAY_MIX:
        raise RuntimeError(f"Expected all tensors to be on the same device, in {name}")
    target, options = None, dict(kwargs)
    if "device" in options:
        target = None if options["device"] is None else torch.device(options["device"])
        options["device"] = torch.device("cpu")
    stays = target is None or target.type == DEVICE.type
    copies_back = name == "aten::_to_copy" and simulated and not stays
    copies_back |= name == "aten::copy_" and not isinstance(args[0], SimTensor)
    _record(name, waits=name in _WAITS or copies_back)
    plain = {key: _map(_unwrap, value) for key, value in options.items()}
    result = func(*_map(_unwrap, args), **plain)
    if name == "aten::_to_copy":
        lands = stays if target is not None else bool(simulated)
        return _map(_wrap, result) if lands else result
    if name in _SCALARS:
        return result
    if _returns_written(func):
        written = [
            value
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        written += [value for key, value in kwargs.items() if key.startswith("out")]
        return written[0] if len(written) == 1 else tuple(written)
    return _map(_wrap, result)


_library = torch.library.Library("_", "IMPL")
_library.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")

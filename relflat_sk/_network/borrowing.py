"""Make a network compute in another way for a while, and give it back as it was."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from threading import Lock, RLock
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.amp import is_autocast_available
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from relflat_sk._random import fork_rng

# -- other forward methods for a while -----------------------------------------------------
# Every replacement in the package is made here: to record what passes a layer, to run attention
# step by step, to differentiate normalisations through their definition. An instance attribute
# costs less than a hook, which counts in training steps, and reaches every caller of the
# module, also those that call `forward` itself.


class ReplacedForwards:
    """Context in which modules run another forward method; afterwards they run their own.

    Replacements can be nested: a forward method that somebody else put in place of the class's
    is put back, too. A class instead of a generator, because the training step enters it.
    """

    def __init__(self, forwards: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> None:
        self._forwards = forwards
        self._before: list[tuple[dict[str, Any], Any]] = []

    def __enter__(self) -> Self:
        for module, forward in self._forwards:
            attributes = module.__dict__
            self._before.append((attributes, attributes.get("forward")))
            attributes["forward"] = forward
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            attributes, forward = self._before.pop()
            if forward is None:
                attributes.pop("forward", None)
            else:
                attributes["forward"] = forward


def has_own_forward(module: nn.Module) -> bool:
    """Return whether a module runs a forward method other than its class's."""
    return "forward" in module.__dict__


def clamp_hardsigmoid(x: Tensor) -> Tensor:
    """Compute `nn.Hardsigmoid` so that torch can differentiate it twice."""
    return (x / 6 + 0.5).clamp(0, 1)


def find_hardsigmoids(module: nn.Module) -> list[nn.Module]:
    """List the modules that compute a hardsigmoid, which torch differentiates once only."""
    return [
        part
        for part in module.modules()
        if type(part).forward is nn.Hardsigmoid.forward and not has_own_forward(part)
    ]


# -- attention, step by step ---------------------------------------------------------------
# Torch computes attention in one fused function, in which no module is called and the three
# input projections are one packed parameter. Within `explicit_attention`, every such module
# runs step by step through its `out_proj` and through a child `in_proj` with the packed weight,
# and computes the same; afterwards it is as it was.


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
    found = [
        m
        for m in module.modules()
        if isinstance(m, nn.MultiheadAttention)
        and m.in_proj_weight is not None
        and m.bias_k is None
        and not m.add_zero_attn
        and not has_own_forward(m)
    ]
    # otherwise whole encoder layers are fused in evaluation mode
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        for attention in found:
            attention._modules["in_proj"] = InProjection(attention)
        with ReplacedForwards((one, partial(_run_attention, one)) for one in found):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for attention in found:
            attention._modules.pop("in_proj", None)


def _run_attention(attention: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Run attention step by step, or as torch does for a sequence without an axis of samples."""
    query = args[0] if args else kwargs["query"]
    forward = _attend if query.ndim == 3 else nn.MultiheadAttention.forward
    found: tuple[Tensor, Tensor | None] = forward(attention, *args, **kwargs)
    return found


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


# a lock for each network that has been borrowed
_BORROWERS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
_LOCK = Lock()


def one_thread(module: nn.Module) -> AbstractContextManager[Any]:
    """Let one thread at a time use a network, which measures change and give back."""
    with _LOCK:
        lock: AbstractContextManager[Any] = _BORROWERS.setdefault(module, RLock())
    return lock


@contextmanager
def borrowed(module: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode, and give it back bit by bit as it was.

    Train/eval mode of every submodule, buffers and the random state come back, also after
    an exception. Inside the context the caller's `torch.autocast` is off, so that the network
    computes in its own precision, and attention runs step by step, see
    `relflat_sk._network.borrowing`. Threads that borrow the same network wait for each other.
    """
    device = next((p.device for p in module.parameters() if p.is_cuda), None)
    with (
        one_thread(module),
        torch.inference_mode(False),
        fork_rng(device),
        autocast_off(*module.parameters(), *module.buffers()),
        _evaluation_mode(module),
        explicit_attention(module),
        ReplacedForwards((part, clamp_hardsigmoid) for part in find_hardsigmoids(module)),
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


class MathAttention:
    """Context in which attention runs in the kernel that has all derivatives.

    It may be entered again while it is open. The choice of a kernel is torch's global state: with
    several contexts open, in threads for example, the last one to end restores it.
    """

    _lock = Lock()
    _open: ClassVar[set["MathAttention"]] = set()
    _choice = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._open:
                self._choice.enter_context(sdpa_kernel(SDPBackend.MATH))
            self._open.add(self)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            if self in self._open:
                self._open.remove(self)
                if not self._open:
                    self._choice.close()

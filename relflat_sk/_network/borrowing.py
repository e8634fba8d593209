"""Make a network compute in another way for a while, and give it back as it was."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from inspect import signature
from itertools import chain
from threading import Lock
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.amp import is_autocast_available
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from relflat_sk._losses.curvature import pull_back
from relflat_sk._numerics import full_precision, read_numbers
from relflat_sk._random import alone, fork_rng

# -- other forward methods for a while -----------------------------------------------------
# Every replacement in the package is made here: to record what passes a layer, to run attention
# step by step, to differentiate normalisations through their definition. An instance attribute
# costs less than a hook, which counts in training steps, and reaches every caller of the
# module, also those that call `forward` itself.


class ReplacedForwards:
    """Context in which modules run another forward method; afterwards they run their own.

    Replacements can be nested: a forward method that somebody else put in place of the class's
    is put back, too. A copy of a module has no replacement. A class instead of a generator,
    because the training step enters it.
    """

    def __init__(self, forwards: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> None:
        self._forwards = forwards
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> Self:
        for module, forward in self._forwards:
            attributes = module.__dict__
            before = {name: attributes[name] for name in _REPLACED if name in attributes}
            self._before.append((attributes, before))
            if "__getstate__" not in before:  # of a replacement around this one
                attributes["__getstate__"] = partial(_state_of_copy, module, before)
            attributes["forward"] = forward
        return self

    def __exit__(self, *error: object) -> None:
        while self._before:
            attributes, before = self._before.pop()
            for name in _REPLACED:
                attributes.pop(name, None)
            attributes.update(before)


_REPLACED = "forward", "__getstate__"


def _state_of_copy(module: nn.Module, before: dict[str, Any]) -> Any:
    """Return the state for a copy of a module, without what is replaced for a while."""
    state: Any = type(module).__getstate__(module)  # type: ignore[no-untyped-call]
    if not isinstance(state, dict):
        return state
    kept = {name: value for name, value in state.items() if name not in _REPLACED}
    if "_modules" in kept:
        parts = module._modules.items()
        kept["_modules"] = {n: part for n, part in parts if not isinstance(part, InProjection)}
    return kept | before


def eagerly() -> AbstractContextManager[Any]:
    """Run what torch.compile has compiled without it: its code can be differentiated once only."""
    # what is compiled has loaded the compiler, which takes long
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def uncompiled(module: nn.Module) -> AbstractContextManager[Any]:
    """Run a network that torch.compile has compiled without it."""
    return eagerly() if is_compiled(module) else nullcontext()


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile has compiled a module, in place or in a wrapper."""
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def unwrapped(module: Any) -> Any:
    """Return the module inside wrappers of `torch.compile` and of torch's data parallelism."""
    name = "module" if isinstance(module, DistributedDataParallel) else "_orig_mod"
    inside = getattr(module, name, None)
    return module if inside is None else unwrapped(inside)


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

    def _save_to_state_dict(self, *_: Any) -> None:
        """Save nothing: attention saves its parameters itself."""

    def _load_from_state_dict(self, *_: Any) -> None:
        """Load nothing."""


@contextmanager
def explicit_attention(module: nn.Module) -> Iterator[None]:
    """Run all attention inside a network step by step, with `in_proj` as a child layer."""
    # In cross-attention `in_proj` projects queries, keys and values together, as positions of one
    # sequence, and projections that are not needed are dropped: so the packed weight has one input.
    # Modules with extra options (other sizes of keys and values, added keys) are left alone.
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
        with ReplacedForwards((one, partial(_attend, one)) for one in found):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for attention in found:
            attention._modules.pop("in_proj", None)


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
    if query.ndim != 3:  # of a sequence without an axis of samples
        return nn.MultiheadAttention.forward(
            attention, query, key, value, key_padding_mask, need_weights, attn_mask,
            average_attn_weights, is_causal,
        )  # fmt: skip
    q, k, v = _project(attention, query, key, value)
    n, heads, length, size = q.shape
    scores = q @ k.transpose(-2, -1) / math.sqrt(size)
    if attn_mask is not None:
        full = attn_mask if attn_mask.ndim == 2 else attn_mask.view(n, heads, *attn_mask.shape[1:])
        scores = _masked(scores, full)
    if key_padding_mask is not None:
        scores = _masked(scores, key_padding_mask[:, None, None, :])
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


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    """Leave out scores where a mask is true, or add the numbers of another mask to them."""
    return scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask


@contextmanager
def borrowed(module: nn.Module, *, with_weights: bool = False) -> Iterator[None]:
    """Put a network into evaluation mode, and give it back bit by bit as it was."""
    # Modes, buffers, weights on demand, and the random state come back, also after an exception.
    # Inside, autocast is off, and attention runs step by step. Threads wait for each other.
    device = next((p.device for p in module.parameters() if p.is_cuda), None)
    with (
        torch.inference_mode(False),
        fork_rng(device),
        eagerly(),
        autocast_off(*module.parameters(), *module.buffers()),
        evaluation_mode(module, with_weights=with_weights),
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
def evaluation_mode(module: nn.Module, *, with_weights: bool = False) -> Iterator[None]:
    """Put a network into evaluation mode by its own methods, and give it back to the bit."""
    # Its parameters may have other numbers inside, as those of loralib.
    with alone():
        parts = list(module.modules())
        modes = [part.training for part in parts]
        switching = [part for part in parts if any(modes) and _switches(part)]
        changing = dict.fromkeys(inside for part in switching for inside in part.modules())
        # an embedding with max_norm changes its weight in each pass
        changing |= dict.fromkeys(p for p in parts if with_weights or getattr(p, "max_norm", None))
        homes: list[Any] = [part._buffers for part in parts]
        homes += [part._parameters for part in changing]
        before = [(home, dict(home)) for home in homes]
        tensors = [t for _, named in before for t in named.values() if t is not None]
        contents = [(t, t.detach(), t._version, t.detach().clone()) for t in dict.fromkeys(tensors)]
        try:
            if any(modes):
                module.eval()
            yield
        finally:
            for part, mode in zip(parts, modes, strict=True):  # parents first: they switch children
                if part.training != mode:
                    part.train() if mode else part.eval()
            for part, mode in zip(parts, modes, strict=True):
                part.training = mode
            for home, named in before:
                home.update(named)
            _restore(contents)


def _switches(module: nn.Module) -> bool:
    """Return whether a module does more than torch between the modes, as those of loralib do."""
    return any(
        name in module.__dict__ or getattr(type(module), name) is not getattr(nn.Module, name)
        for name in ("train", "eval")
    )


def _restore(contents: Sequence[tuple[Tensor, Tensor, int, Tensor]]) -> None:
    """Give tensors their memory and numbers back: each with memory, version and numbers then."""
    dense = []
    for tensor, memory, version, content in contents:
        if tensor.layout is torch.strided and not tensor.is_meta:
            if tensor.data_ptr() != memory.data_ptr():
                tensor.data = memory
            dense.append((tensor.data, content))
        elif tensor._version != version:
            tensor.data.copy_(content)
    # batch norm and `tensor.data` change numbers without a new version
    flags = [(numbers != content).any() for numbers, content in dense]
    moved = read_numbers(*(flag.to(flags[0].device) for flag in flags)) if flags else []
    for (numbers, content), differs in zip(dense, moved, strict=True):
        if differs:
            numbers.copy_(content)


@contextmanager
def changed(things: Iterable[Any], attribute: str, value: Any) -> Iterator[None]:
    """Give an attribute of some things another value for a while."""
    before = [(thing, getattr(thing, attribute)) for thing in things]
    try:
        for thing, _ in before:
            setattr(thing, attribute, value)
        yield
    finally:
        for thing, earlier in before:
            setattr(thing, attribute, earlier)


def by_all_names(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name tensors by all their uses, for `functional_call` without `tie_weights`."""
    # With it, torch does not give a part that has two names its own tensors back.
    named = chain(module.named_parameters(), module.named_buffers())
    news = {tensor: tensors[name] for name, tensor in named if name in tensors}
    return {
        f"{prefix}.{name}".removeprefix("."): news[tensor]
        for prefix, part in module.named_modules()  # each part once
        for name, tensor in chain(part._parameters.items(), part._buffers.items())
        if tensor is not None and tensor in news
    }


def requiring_grad(parameters: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Let the graph show where frozen parameters are read."""
    frozen = [p for p in parameters if not p.requires_grad and p.is_floating_point()]
    return changed(frozen, "requires_grad", True)


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


# -- normalisations, differentiable as often as a penalty needs -----------------------------------
# A penalty at an earlier layer differentiates the network behind that layer several times: its
# gradient is a third derivative of the loss. Torch's formula for the second derivative of its
# fused normalisations treats the mean and deviation that the forward pass saved as constants, so
# that every third derivative is wrong, without an error. Within `ExplicitLayers`, normalisation
# layers compute the same as before, but are differentiated through their definition.


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, _InstanceNorm, nn.LayerNorm,
          nn.GroupNorm, nn.RMSNorm)  # fmt: skip


class ExplicitLayers(ReplacedForwards):
    """Context in which normalisation layers run so that a penalty can differentiate them."""

    def __init__(self, layers: Iterable[nn.Module] = ()) -> None:
        super().__init__((layer, partial(_run, layer, self)) for layer in layers)
        self.pulls_back = False

    def pull_back(
        self,
        of: Sequence[Tensor],
        inputs: Sequence[Any],
        vectors: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Pull vectors back with their graph, see `relflat_sk._losses.pull_back`.

        The statistics of a batch are constants in this differentiation, but not in later ones.
        """
        with changed([self], "pulls_back", True):
            return pull_back(of, inputs, vectors, create_graph=True)


def find_fused(module: nn.Module) -> list[nn.Module]:
    """List a network's normalisations and hardsigmoids: torch cannot differentiate them thrice."""
    return find_hardsigmoids(module) + [
        layer
        for layer in module.modules()
        if isinstance(layer, _NORMS) and not has_own_forward(layer)
    ]


# the functions that compute normalisations
_FUNCTIONS: dict[Any, type[nn.Module]] = {
    F.batch_norm: _BatchNorm, F.group_norm: nn.GroupNorm, F.instance_norm: _InstanceNorm,
    F.layer_norm: nn.LayerNorm, F.rms_norm: nn.RMSNorm,
}  # fmt: skip


def _run(layer: Any, explicit: ExplicitLayers, *args: Any, **kwargs: Any) -> Any:
    """Run a layer so that further derivatives are those of its definition."""
    if isinstance(layer, nn.Hardsigmoid):
        return clamp_hardsigmoid(*args, **kwargs)
    with _ExplicitFunctions(layer, explicit):
        return type(layer).forward(layer, *args, **kwargs)


class _ExplicitFunctions(TorchFunctionMode):
    """Differentiates the normalisation that a layer calls, whatever its forward method adds."""

    def __init__(self, layer: Any, explicit: ExplicitLayers) -> None:
        super().__init__()
        self._layer, self._explicit = layer, explicit

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch; a normalisation of the layer's kind by its definition."""
        layer, kwargs = self._layer, kwargs or {}
        kind = _FUNCTIONS.get(func)
        if kind is None or not isinstance(layer, kind) or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        call = signature(func).bind(*args, **kwargs)
        call.apply_defaults()
        inputs = call.arguments
        of_batch = kind is _BatchNorm
        by_input = not of_batch or inputs["training"] or inputs["running_mean"] is None
        by_input = by_input and inputs.get("use_input_stats", True)
        if not by_input or inputs["eps"] != layer.eps:
            return func(*args, **kwargs)
        function = _OfBatch if of_batch else _OfSample
        tensors = inputs["input"], inputs["weight"], inputs.get("bias")
        run = partial(func, *call.args, **call.kwargs)
        return function.apply(layer, self._explicit, run, *tensors)  # type: ignore[no-untyped-call]


class _OfSample(torch.autograd.Function):
    """A normalisation with its fused forward pass and the gradient of its definition."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: Any,
        explicit: ExplicitLayers,
        run: Callable[[], Tensor],
        *tensors: Tensor | None,  # input, weight, bias
    ) -> Tensor:
        ctx.layer, ctx.explicit = layer, explicit
        ctx.save_for_backward(*tensors)
        return run()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        again, tensors, used = torch.is_grad_enabled(), ctx.saved_tensors, ctx.needs_input_grad[3:]
        if ctx.explicit.pulls_back:
            used = (used[0], False, False)
        if not again:  # keep the new graph apart from the one that is being freed
            tensors = [t if t is None else t.detach().requires_grad_() for t in tensors]
        with torch.enable_grad():
            x, weight, bias = tensors
            centred, scale, shape = _normalise(ctx.layer, full_precision(x))
            out = (centred * scale).reshape(x.shape)
            out = out if weight is None else out * weight.view(shape)
            out = (out if bias is None else out + bias.view(shape)).to(outer.dtype)
        needed = [t for t, is_used in zip(tensors, used, strict=True) if is_used]
        found = iter(torch.autograd.grad(out, needed, outer, create_graph=again))
        return None, None, None, *(next(found) if is_used else None for is_used in used)


class _OfBatch(_OfSample):
    """A normalisation by statistics of the batch: given these, a linear map of each sample."""

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        if not (torch.is_grad_enabled() and ctx.explicit.pulls_back):
            return _OfSample.backward(ctx, outer)
        x, weight, _ = ctx.saved_tensors
        _, scale, shape = _normalise(ctx.layer, full_precision(x))
        scale = scale if weight is None else scale * weight.view(shape)
        scaled: Any = _Scaled.apply
        pulled = scaled(ctx.explicit, full_precision(outer), scale).to(outer.dtype)
        return None, None, None, pulled, None, None


class _Scaled(torch.autograd.Function):
    """A product with numbers for each channel, constants where vectors are pulled back."""

    @staticmethod
    def forward(ctx: Any, explicit: ExplicitLayers, outer: Tensor, scale: Tensor) -> Tensor:
        ctx.explicit = explicit
        ctx.save_for_backward(outer, scale)
        return outer * scale

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[None, Tensor, Tensor | None]:
        outer, scale = ctx.saved_tensors
        of_scale = None if ctx.explicit.pulls_back else (slope * outer).sum_to_size(scale.shape)
        return None, slope * scale, of_scale


def is_explicit_batch_norm(node: Any) -> bool:
    """Return whether a node of autograd's graph is batch norm by statistics of the batch."""
    explicit, layer = getattr(node, "explicit", None), getattr(node, "layer", None)
    return isinstance(explicit, ExplicitLayers) and isinstance(layer, _BatchNorm)


def _normalise(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Return the centred input, one over its deviation, and the shape of the layer's weight."""
    rows, axes, shape = _arrange(layer, x)
    eps = torch.finfo(x.dtype).eps if layer.eps is None else layer.eps
    centred = rows if isinstance(layer, nn.RMSNorm) else rows - rows.mean(axes, keepdim=True)
    return centred, (centred.square().mean(axes, keepdim=True) + eps).rsqrt(), shape


def _arrange(layer: Any, x: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """Return the input, the axes to take means over, and the shape of the layer's weight."""
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        shape = tuple(layer.normalized_shape)
        return x, tuple(range(-len(shape), 0)), shape
    if isinstance(layer, _InstanceNorm):
        # there may be no axis of samples
        positions = layer._get_no_batch_dim() - 1  # type: ignore[no-untyped-call]
        return x, tuple(range(-positions, 0)), (-1, *[1] * positions)
    shape = (-1, *[1] * (x.ndim - 2))
    if isinstance(layer, nn.GroupNorm):
        return x.reshape(len(x), layer.num_groups, -1), (2,), shape
    return x, (0, *range(2, x.ndim)), shape

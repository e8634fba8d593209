"""A net in training that can be one of a stacked model, or the reason why it cannot."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from relflat_sk._network import cast_inputs
from relflat_sk._penalty import PenaltyLimit
from relflat_sk.fleet._stackable import NotStackable, Parts, check_stackable
from relflat_sk.fleet._updates import find_update
from relflat_sk.training import ArrayLoader, StopAtGradientNorm, split_target

__all__ = ["Member", "Same", "criterion_key", "make_member", "module_key"]

# what torch itself keeps in a module; all else is the module's own
_OF_TORCH = nn.Module().__dict__.keys()


@dataclass(eq=False)
class Member:
    """A net in training, with its data."""

    net: Any
    loader: ArrayLoader
    key: tuple[Any, ...] = field(init=False)
    has_dropout: bool = field(init=False)
    inputs: Tensor = field(init=False)
    targets: Tensor = field(init=False)
    weights: Tensor = field(init=False)
    order: Tensor = field(init=False)
    seed: int = field(init=False, default=0)
    random_state: Tensor = field(init=False)
    running_gradient: float = field(init=False, default=0.0)
    hardest: Tensor | None = field(init=False, default=None)

    @property
    def has_ignored(self) -> bool:
        """Whether the criterion ignores some of the targets."""
        return bool(self.key[1])

    @property
    def has_weights(self) -> bool:
        """Whether the samples have weights."""
        return bool(self.key[2])

    @property
    def module(self) -> nn.Module:
        """The net's own network."""
        module: nn.Module = self.net.module_
        return module

    def first_batch(self) -> tuple[Tensor, Tensor]:
        """Return the samples of the data that come first, as many as a batch has."""
        size = min(int(self.loader.batch_size or 1), self.loader.n_rows)
        inputs = self.moved(self.inputs[:size])
        return inputs, self.targets[:size].to(inputs.device)

    def moved(self, inputs: Tensor) -> Tensor:
        """Move inputs to the network's device and its dtype."""
        device = next(self.module.parameters()).device
        found: Tensor = cast_inputs(inputs.to(device), self.module)
        return found

    @property
    def has_own_inputs(self) -> bool:
        """Whether `inputs` are those of the loader, which a callback may change in place."""
        own = self.loader.parts[0]
        return own is self.inputs or _is_equal(own, self.inputs)

    def share_data(self, members: Iterable["Member"]) -> None:
        """Use the inputs of another member if they are equal, so that they are held once."""
        self.inputs = self.loader.parts[0]
        for other in members:
            if _is_equal(self.inputs, other.inputs):
                self.inputs = other.inputs
                return

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The net's own optimizer."""
        optimizer: torch.optim.Optimizer = self.net.optimizer_
        return optimizer

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the optimizer now."""
        settings: Mapping[str, Any] = self.optimizer.param_groups[0]
        return settings

    @property
    def stops_at_gradient(self) -> bool:
        """Whether the net stops at a gradient norm."""
        return any(isinstance(one, StopAtGradientNorm) for _, one in self.net.callbacks_)

    @property
    def valid_batch_size(self) -> int | None:
        """The size of the batches in which data are evaluated; None if they are not just cut."""
        arguments = self.net.get_params_for("iterator_valid")
        if self.net.iterator_valid is not DataLoader or arguments.keys() - {"batch_size"}:
            return None
        size = int(arguments.get("batch_size", self.net.batch_size))
        return self.loader.n_rows if size == -1 else size

    @property
    def is_penalised(self) -> bool:
        """Whether the net is trained with a penalty."""
        return bool(self.net.flatness_weight > 0)

    @property
    def limit(self) -> PenaltyLimit:
        """The limit of the net's penalty."""
        limit: PenaltyLimit = self.net._penalty_limit()
        return limit

    def draw(self) -> None:
        """Draw what is random in the next epoch from torch's global random state."""
        self.order = self.loader.draw_order()
        if self.has_dropout:
            self.seed = int(torch.randint(2**63 - 1, ()))
        self.random_state = torch.get_rng_state()


def make_member(net: Any, loader: Any, fit_params: Mapping[str, Any]) -> Member:
    """Make a member of a net, at the beginning of an epoch."""
    parts = Parts(net.module_)
    check_stackable(net, parts, fit_params)
    if not isinstance(loader, ArrayLoader):
        raise NotStackable("its batches are not cut out of arrays")
    inputs, labels = loader.parts
    targets, weights = split_target(labels)
    member = Member(net, loader)
    member.key = (
        _data_key(loader, inputs, targets),
        _has_ignored(net.criterion_, targets),
        weights is not None,
        _parts_key(parts),
        criterion_key(net.criterion_),
        _optimizer_key(net),
        _penalty_key(net),
    )
    member.has_dropout = any(isinstance(one, nn.Dropout) and one.p for _, one in parts.modules)
    member.inputs, member.targets = inputs, targets
    member.weights = torch.ones(()).expand(len(inputs)) if weights is None else weights
    return member


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of the same shape and type have the same numbers."""
    same = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return same or torch.equal(one, other)


def _data_key(loader: ArrayLoader, inputs: Any, targets: Any) -> tuple[Any, ...]:
    """Return what the data of members have in common."""
    for name, part in (("inputs", inputs), ("targets", targets)):
        if type(part) is not Tensor:
            raise NotStackable(f"its {name} are not one array")
    size = min(int(loader.batch_size or 1), loader.n_rows)
    if loader.drop_last and loader.n_rows < int(loader.batch_size or 1):
        raise NotStackable("it has fewer samples than a batch, and drops them")
    shapes = [(tuple(part.shape[1:]), part.dtype, part.device) for part in (inputs, targets)]
    return loader.n_rows, size, bool(loader.drop_last), *shapes


def _has_ignored(criterion: Any, targets: Tensor) -> bool:
    """Return whether a criterion ignores some of the targets."""
    ignored = getattr(criterion, "ignore_index", None)
    return ignored is not None and bool((targets == ignored).any())


def module_key(module: nn.Module) -> tuple[Any, ...]:
    """Return what makes two modules the same function of their parameters, buffers and inputs."""
    return _parts_key(Parts(module))


def criterion_key(criterion: Any) -> tuple[Any, ...]:
    """Return what makes two criteria without parameters the same function of their inputs."""
    if not isinstance(criterion, nn.Module):
        return (Same(criterion),)
    parts = Parts(criterion)
    return _parts_key(parts), *[tuple(buffer.flatten().tolist()) for _, buffer in parts.buffers]


def _parts_key(parts: Parts) -> tuple[Any, ...]:
    modules = [
        (name, type(part), part.extra_repr(), _attributes(part)) for name, part in parts.modules
    ]
    tensors = [
        (name, tuple(tensor.shape), tensor.dtype, tensor.device)
        for name, tensor in (*parts.parameters, *parts.buffers)
    ]
    return tuple(modules), tuple(tensors)


def _attributes(part: nn.Module) -> tuple[Any, ...]:
    """Return a module's own attributes."""
    own = part.__dict__.keys() - _OF_TORCH
    return tuple((name, _comparable(part.__dict__[name])) for name in sorted(own))


def _comparable(value: Any) -> Any:
    """Return a value in a form that can be compared; two objects are different."""
    kind = type(value)
    if kind in (bool, int, float, str, type(None), torch.dtype, torch.device):
        return kind, value
    if kind in (list, tuple):
        return kind, tuple(map(_comparable, value))
    if kind is dict:
        return kind, tuple((_comparable(key), _comparable(one)) for key, one in value.items())
    return Same(value)


@dataclass(frozen=True, eq=False)
class Same:
    """Equal to others of the same object, which it holds, so that no other gets its address."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _optimizer_key(net: Any) -> tuple[Any, ...]:
    """Return what the optimizers of members have in common; the rest is each member's own."""
    optimizer = net.optimizer_
    update = find_update(optimizer)
    if len(optimizer.param_groups) > 1:
        raise NotStackable("its optimizer has several groups of parameters")
    settings = optimizer.param_groups[0]
    for name in ("amsgrad", "maximize", "differentiable"):
        if settings.get(name):
            raise NotStackable(f"its optimizer has {name}=True")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise NotStackable("its optimizer has hooks")
    if any(isinstance(value, Tensor) for value in settings.values()):
        raise NotStackable("its optimizer has a setting that is a tensor")
    return update, update.names(settings)


def _penalty_key(net: Any) -> tuple[Any, ...]:
    """Return the settings of the penalty that members have in common, but for its weight."""
    if not net.flatness_weight > 0:
        return ()
    layer = net.flatness_layer
    layers = tuple(layer) if isinstance(layer, list | tuple) else (layer,)
    return layers, net.flatness_normalize, net.flatness_probes, net.flatness_clip is None

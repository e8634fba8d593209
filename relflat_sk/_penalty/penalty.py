"""Relative flatness of a mini-batch as a term of the training loss.

Noise of relative size ``delta`` in a layer's features raises the loss, to first order, by
``delta^2 kappa / (2 m)`` (P21 Theorem 5). The penalty adds this quantity for ``delta = 1``. It is
computed from what the forward pass of the training step sends through the layer, without a
second pass. Its gradient flows to all parameters that influence features, weight or predictions.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk._checks import check_integer
from relflat_sk._losses import Loss, Target, as_criterion
from relflat_sk._network import (
    Layer,
    LayerRecord,
    Recorder,
    check_unshared,
    check_weights,
    explicit_attention,
    explicit_norms,
    find_layer,
    find_norm_layers,
    keep_graph,
    primary_output,
    weight_layers,
)
from relflat_sk._penalty.batch_flatness import batch_flatness

__all__ = ["RelativeFlatnessPenalty"]


class RelativeFlatnessPenalty:
    r"""Compute the relative flatness of a batch, to add to the loss of a plain torch loop.

    The penalty is

    .. math:: \sum_{\text{layers}} \frac{\kappa}{2 m}, \qquad
        \kappa = \sum_{s,t} \langle w_s, w_t \rangle \mathrm{Tr}(H_{s,t}),

    where :math:`m` is the number of features that the layer receives, and :math:`H` the Hessian
    of the criterion on the batch in the layer's weight ([1]_, Definition 3 and Theorem 5).

    Parameters
    ----------
    layer : int, str, nn.Module, a sequence of these, or "all", default=-1
        The penalised layer: its position among the layers with a weight matrix in the order of
        the forward pass, its dotted name, or the module. The terms of several layers are added.
    normalize : bool, default=False
        Whether to use the normalised flatness (Theorem 4), with the standard deviations of the
        features in the batch.
    probes : int, default=1
        Number of random probes per sample where there is no closed form: at hidden layers, and
        for criteria that `relflat_sk` does not know. The penalty is unbiased for any number.

    Raises
    ------
    ValueError
        If `probes` is not a positive integer, or `layer` is empty. When called: if layer,
        target or weights do not fit the forward pass.
    LayerNotFoundError
        From `capture`, if there is no such layer.
    RuntimeError
        If called without a forward pass inside `capture`.

    See Also
    --------
    RelativeFlatnessRegularizedNet : A skorch net with this penalty.
    relative_flatness : Measure :math:`\kappa` of a trained network.

    Notes
    -----
    Any layer that `relflat_sk.relative_flatness` measures can be penalised. For a convolution,
    `m` is the number of inputs of one patch. Batch norm in training mode counts as a linear map
    with the statistics of the batch.

    No part of the network runs a second time. A penalty at an earlier layer costs one more
    differentiation of the network behind that layer.

    References
    ----------
    .. [1] H. Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021.

    Examples
    --------
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> criterion, penalty = torch.nn.CrossEntropyLoss(), RelativeFlatnessPenalty()
    >>> X, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> with penalty.capture(net):
    ...     y_pred = net(X)
    >>> loss = criterion(y_pred, y) + 0.1 * penalty(criterion, y_pred, y)
    >>> loss.backward()
    """

    def __init__(
        self,
        layer: Layer | Sequence[Layer] = -1,
        normalize: bool = False,
        probes: int = 1,
    ) -> None:
        check_integer("probes", probes, minimum=1)
        if isinstance(layer, list | tuple) and not layer:
            raise ValueError("layer must name at least one layer, got an empty sequence.")
        self.layer = layer
        self.normalize = normalize
        self.probes = probes
        self._recorder: Recorder | None = None
        self._plan: _Plan | None = None

    def capture(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Record what a forward pass sends through the layers.

        Parameters
        ----------
        module : nn.Module
            The network in training.

        Returns
        -------
        context manager
            Call the network inside it, once.

        Examples
        --------
        >>> import torch
        >>> net, penalty = torch.nn.Linear(4, 3), RelativeFlatnessPenalty()
        >>> with penalty.capture(net):
        ...     y_pred = net(torch.ones(5, 4))
        """
        self._recorder = None  # if the forward pass fails, nothing of an earlier one is used
        asked, plan = self._asked(), self._plan
        if plan is None or not plan.is_of(module, asked):
            return self._make_plan(module, asked)
        if plan.in_attention or plan.norms:
            return self._record_explicitly(module, plan)
        self._recorder = plan.recorder(plan.layers)
        return self._recorder

    @contextmanager
    def _record_explicitly(self, module: nn.Module, plan: "_Plan") -> Iterator[None]:
        """Record a forward pass that runs attention and normalisations step by step."""
        attention = explicit_attention(module) if plan.in_attention else nullcontext()
        with attention, explicit_norms(plan.norms):
            # the projections inside attention are new modules in each step
            layers = {name: module.get_submodule(name) for name in plan.layers}
            with plan.recorder(layers) as recorder:
                yield
        self._recorder = recorder

    @contextmanager
    def _make_plan(self, module: nn.Module, asked: tuple[Layer, ...] | None) -> Iterator[None]:
        """Record all layers in a first forward pass, and find those that later ones need."""
        # the order of the calls is known only afterwards; training keeps the inputs of all
        # layers for the backward pass anyway
        parts, norms = list(module.modules()), find_norm_layers(module)
        with explicit_attention(module), explicit_norms(norms):
            layers = weight_layers(module)
            names = _names(module, asked, list(layers))
            with _recorder(layers, names) as recorder:
                yield
            penalised = _names(module, asked, recorder.order)
            named = dict(module.named_modules())
            for name in penalised:
                check_unshared(name, named)
            self._plan = _Plan.make(asked, parts, named, penalised, recorder.order, norms)
        self._recorder = recorder

    def _asked(self) -> tuple[Layer, ...] | None:
        """Return the layers as the user names them now, None for all."""
        layer: Any = self.layer
        if isinstance(layer, str) and layer == "all":
            return None
        return tuple(layer) if isinstance(layer, list | tuple) else (layer,)

    def __call__(
        self, criterion: Any, y_pred: Any, y: Tensor, sample_weight: Tensor | None = None
    ) -> Tensor:
        """Compute the penalty of the last forward pass inside `capture`.

        Parameters
        ----------
        criterion : nn.Module or callable
            The loss, called as ``criterion(y_pred, y)``.
        y_pred : Tensor of shape (n, ...)
            The output of that forward pass.
        y : Tensor of shape (n, ...)
            The targets.
        sample_weight : Tensor of shape (n,), optional
            Weight of each sample in the mean loss whose flatness is penalised: finite, not
            negative, and not all zero.

        Returns
        -------
        Tensor of shape ()
            In the unit of the loss, with its graph. It is summed over samples if the criterion
            is, and a mean otherwise.
        """
        loss = Loss(as_criterion(criterion))
        output = primary_output(y_pred)
        if sample_weight is not None:
            check_weights(sample_weight.detach().cpu(), len(output))
        output = loss.classes_second(output, y)
        return self.of_batch(loss, output, loss.read_target(output, y), sample_weight)

    def of_batch(
        self,
        loss: Loss,
        output: Tensor,
        target: Target,
        sample_weight: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        """Compute the penalty for a target that has been checked already.

        Parameters
        ----------
        loss : Loss
            The criterion.
        output : Tensor of shape (n, ...)
            The output of the last forward pass inside `capture`.
        target : Target
            Target from `loss.read_target`.
        sample_weight : Tensor of shape (n,), optional
            Weight of each sample, checked already.
        scale : float, default=1.0
            Factor to multiply the penalty by.

        Returns
        -------
        Tensor of shape ()
            The penalty, with its graph.

        Raises
        ------
        RuntimeError
            If there was no forward pass inside `capture` since the last call.
        """
        recorder, plan = self._recorder, self._plan
        if plan is None or recorder is None or not recorder.finished:
            raise RuntimeError(
                "the penalty has recorded no forward pass. Call the network inside `with "
                "penalty.capture(module):` before each call of the penalty. A network compiled "
                "by torch.compile cannot be recorded: capture and call the original module."
            )
        device = output.device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device_type=device, enabled=False):
                return self.of_batch(loss, output, target, sample_weight, scale)
        self._recorder = None
        return batch_flatness(
            loss,
            output,
            target,
            [recorder[name] for name in plan.layers],
            plan.penalised,
            probes=self.probes,
            normalize=self.normalize,
            sample_weight=sample_weight,
            scale=scale,
        )


@dataclass(frozen=True)
class _Plan:
    """The structure of a network, which need not be searched again in each training step."""

    asked: tuple[Layer, ...] | None  # the layers as the user named them; None for all
    parts: list[nn.Module]  # all modules of the network
    children: list[dict[str, nn.Module | None]]  # those of each part
    layers: dict[str, nn.Module]  # the layers to record: the penalised ones, and the last one
    penalised: list[str]
    in_attention: bool  # whether attention must run step by step
    norms: list[nn.Module]  # normalisation layers that must allow three derivatives

    @classmethod
    def make(
        cls,
        asked: tuple[Layer, ...] | None,
        parts: list[nn.Module],
        named: Mapping[str, nn.Module],
        penalised: list[str],
        order: list[str],
        norms: list[nn.Module],
    ) -> "_Plan":
        """Make the plan of a network whose layers were called in some order."""
        last = order[-1:]
        layers = {n: named[n] for n in [*(n for n in penalised if n not in last), *last]}
        owners = [named[name.rpartition(".")[0]] for name in layers]
        inside = any(isinstance(owner, nn.MultiheadAttention) for owner in owners)
        # a penalty at the last layer differentiates no other part of the network again
        earlier = any(name != order[-1] for name in penalised)
        children = [dict(part._modules) for part in parts]
        return cls(asked, parts, children, layers, penalised, inside, norms if earlier else [])

    def is_of(self, module: nn.Module, asked: tuple[Layer, ...] | None) -> bool:
        """Return whether the network is the one of this plan, with the same parts."""
        return (
            module is self.parts[0]
            and asked == self.asked
            and [part._modules for part in self.parts] == self.children
        )

    def recorder(self, layers: Mapping[str, nn.Module]) -> Recorder:
        """Make a recorder of the layers of a training step."""
        return _recorder(layers, self.penalised)


def _names(module: nn.Module, asked: Sequence[Layer] | None, order: list[str]) -> list[str]:
    """Return the dotted names of the layers that the user asked for."""
    if asked is None:
        return order
    return [find_layer(module, layer, order) for layer in asked]


def _recorder(layers: Mapping[str, nn.Module], penalised: Sequence[str]) -> Recorder:
    """Make a recorder after which a penalised layer has a gradient if all before it is frozen."""

    def keep(
        record: LayerRecord, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        if not output.requires_grad and record.name in penalised and torch.is_grad_enabled():
            # the layers behind can still be trained to make this one flat
            output = output.detach().requires_grad_().view_as(output)
        return keep_graph(record, args, kwargs, output)

    return Recorder(layers, keep)

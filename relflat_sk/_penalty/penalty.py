"""Relative flatness of a mini-batch as a term of the training loss.

The price that a loss pays for feature noise of relative size ``delta`` is, to first order,
``delta^2 kappa / (2 m)`` (P21 Theorem 5), which is what the penalty adds. It is computed
from what the training step's own forward pass sends through the layer: no second pass,
and the gradient flows to everything that influences features, weight and predictions.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
    layer_map,
    primary_output,
    weight_layers,
)
from relflat_sk._penalty.batch_flatness import BatchLayer, batch_flatness

__all__ = ["RelativeFlatnessPenalty"]


class RelativeFlatnessPenalty:
    r"""Relative flatness of a batch, to be added to the loss of a plain torch loop.

    .. math:: \sum_{\text{layers}} \frac{\kappa}{2 m}, \qquad
        \kappa = \sum_{s,t} \langle w_s, w_t \rangle \mathrm{Tr}(H_{s,t})

    with `m` the number of features that the layer receives and `H` the Hessian, in the
    layer's weight, of the criterion on the batch ([1]_, Definition 3 and Theorem 5).

    Parameters
    ----------
    layer : int, str, nn.Module, a sequence of these, or "all", default=-1
        Where to measure; with several layers the terms add.
    normalize : bool, default=False
        Use the normalised flatness (Theorem 4), with the batch's standard deviations.
    probes : int, default=1
        Random probes per sample where no closed form applies, that is at earlier layers
        and for criteria that are not in the table. Unbiased for any number.

    Notes
    -----
    Any layer that `relflat_sk.relative_flatness` measures can be penalised, of a convolution
    with `m` the number of inputs of one patch. Batch norm in training mode counts as the
    linear map that it is for the statistics of the batch. Nothing is run a second time: the
    price of an earlier layer is that of differentiating the network behind it once more.

    Raises
    ------
    ValueError
        If `probes` is not a positive integer; when called, if layer, target or weights do not fit.
    LayerNotFoundError
        From `capture`, if there is no such layer.
    RuntimeError
        If called without a forward pass inside `capture`.

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
        if isinstance(probes, bool) or not isinstance(probes, int | np.integer) or probes < 1:
            raise ValueError(f"probes must be a positive integer, got {probes!r}.")
        if isinstance(layer, list | tuple) and not layer:
            raise ValueError("layer must name at least one layer, got an empty sequence.")
        self.layer = layer
        self.normalize = normalize
        self.probes = probes
        self._recorder: Recorder | None = None
        self._plan: _Plan | None = None

    def capture(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Record what the forward pass inside the context sends through the layers.

        Parameters
        ----------
        module : nn.Module
            The network that is trained.

        Returns
        -------
        context manager
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
        """Compute the penalty of the batch last seen by `capture`.

        Parameters
        ----------
        criterion : nn.Module or callable
            The loss, as it is called on ``(y_pred, y)``.
        y_pred : Tensor of shape (n, ...)
            The output of that forward pass.
        y : Tensor
            The targets.
        sample_weight : Tensor of shape (n,), optional
            Weight of each sample in the mean loss whose flatness is penalised: finite, not
            negative, and not all zero.

        Returns
        -------
        Tensor of shape ()
            In the unit of the loss, with its graph; follows the criterion's reduction.
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
        """Compute the same of a target that has been read already.

        Parameters
        ----------
        loss : Loss
        output : Tensor of shape (n, ...)
        target : Target
            From `loss.read_target`.
        sample_weight : Tensor of shape (n,), optional
        scale : float, default=1.0
            What to multiply it by.

        Returns
        -------
        Tensor of shape ()
        """
        recorder, plan = self._recorder, self._plan
        if plan is None or recorder is None or not recorder.finished:
            raise RuntimeError(
                "the penalty has seen no forward pass: call the network inside `with "
                "penalty.capture(module):` before each call of the penalty. (A compiled "
                "network ignores what is to be recorded.)"
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
            plan.batch_layers(recorder),
            probes=self.probes,
            normalize=self.normalize,
            sample_weight=sample_weight,
            scale=scale,
        )


@dataclass(frozen=True)
class _Plan:
    """Where to look in a network: nothing to find out again in each training step."""

    asked: tuple[Layer, ...] | None  # as the user named the layers
    parts: list[nn.Module]  # of the network
    children: list[dict[str, nn.Module | None]]  # of each part
    layers: dict[str, nn.Module]  # what is penalised, then the last one in any case
    penalised: list[str]
    in_attention: bool  # whether attention must be run step by step
    norms: list[nn.Module]  # to be differentiated three times

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
        last = order[-1:]
        layers = {n: named[n] for n in [*(n for n in penalised if n not in last), *last]}
        owners = [named[name.rpartition(".")[0]] for name in layers]
        inside = any(isinstance(owner, nn.MultiheadAttention) for owner in owners)
        # nothing is behind the last layer that would be differentiated again
        earlier = any(name != order[-1] for name in penalised)
        children = [dict(part._modules) for part in parts]
        return cls(asked, parts, children, layers, penalised, inside, norms if earlier else [])

    def is_of(self, module: nn.Module, asked: tuple[Layer, ...] | None) -> bool:
        """Whether the network is the one it was made for, and is still made of the same."""
        return (
            module is self.parts[0]
            and asked == self.asked
            and [part._modules for part in self.parts] == self.children
        )

    def recorder(self, layers: Mapping[str, nn.Module]) -> Recorder:
        """Make a recorder of the layers of a training step."""
        return _recorder(layers, self.penalised)

    def batch_layers(self, recorder: Recorder) -> list[BatchLayer]:
        """Return what a training step sent through the layers."""
        records = [recorder[name] for name in self.layers]
        return [
            BatchLayer(record, layer_map(record.layer), record.name in self.penalised)
            for record in records
        ]


def _names(module: nn.Module, asked: Sequence[Layer] | None, order: list[str]) -> list[str]:
    if asked is None:
        return order
    return [find_layer(module, layer, order) for layer in asked]


def _recorder(layers: Mapping[str, nn.Module], penalised: Sequence[str]) -> Recorder:
    """Make a recorder that lets the tail of the network be trained if all before is frozen."""

    def keep(
        record: LayerRecord, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        if not output.requires_grad and record.name in penalised and torch.is_grad_enabled():
            # what follows may be trained to be flat here
            output = output.detach().requires_grad_().view_as(output)
        return keep_graph(record, args, kwargs, output)

    return Recorder(layers, keep)

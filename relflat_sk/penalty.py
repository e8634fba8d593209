"""Relative flatness of a mini-batch as a term of the training loss.

The price that a loss pays for feature noise of relative size ``delta`` is, to first order,
``delta^2 kappa / (2 m)`` (P21 Theorem 5), which is what the penalty adds. It is computed
from what the training step's own forward pass sends through the layer: no second pass,
and the gradient flows to everything that influences features, weight and predictions.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relflat_sk.curvature import product_curvature, summed_forms
from relflat_sk.layers import (
    WEIGHT_LAYERS,
    Layer,
    Tap,
    check_unshared,
    find_layer,
    find_link,
    primary_output,
)
from relflat_sk.losses import Loss, as_criterion

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

    Raises
    ------
    ValueError
        If `probes` is not a positive integer; when called, if the layer or target do not fit.
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
        self._seen: list[tuple[str, nn.Linear, Tap]] = []
        # the modules of the network last watched, and the layers among them to look at
        self._plan: tuple[list[nn.Module], dict[str, nn.Linear]] | None = None

    @contextmanager
    def capture(self, module: nn.Module) -> Iterator[None]:
        """Record what the forward pass inside the context sends through the layers.

        Parameters
        ----------
        module : nn.Module
            The network that is trained.
        """
        self._seen = []  # nothing old must be taken for new if the forward pass fails
        modules = list(module.modules())
        if self._plan is None or not _same(self._plan[0], modules):
            # the order of the calls is known only afterwards, so watch them all; training
            # keeps what goes into each layer for the backward pass anyway
            named = dict(module.named_modules())
            layers = {name: m for name, m in named.items() if isinstance(m, WEIGHT_LAYERS)}
            with _watch(layers) as taps:
                yield
            names = self._names(module, list(taps))
            self._plan = modules, {name: _linear(named, name) for name in names}
        else:
            with _watch(self._plan[1]) as taps:
                yield
        self._seen = [(name, m, taps.get(name, Tap())) for name, m in self._plan[1].items()]

    def _names(self, module: nn.Module, order: list[str]) -> list[str]:
        if isinstance(self.layer, str) and self.layer == "all":
            return order
        several = isinstance(self.layer, list | tuple)
        layers: Sequence[Layer] = self.layer if several else [self.layer]  # type: ignore[assignment, list-item]
        # `find_layer` walks through the network, which is noticeable in each training step
        return [
            order[layer]
            if type(layer) is int and -len(order) <= layer < len(order)
            else find_layer(module, layer, order)
            for layer in layers
        ]

    def __call__(self, criterion: Any, y_pred: Any, y: Tensor) -> Tensor:
        """Compute the penalty of the batch last seen by `capture`.

        Parameters
        ----------
        criterion : nn.Module or callable
            The loss, as it is called on ``(y_pred, y)``.
        y_pred : Tensor of shape (n, ...)
            The output of that forward pass.
        y : Tensor
            The targets.

        Returns
        -------
        Tensor of shape ()
            In the unit of the loss, with its graph; follows the criterion's reduction.
        """
        loss = Loss(as_criterion(criterion))
        output = primary_output(y_pred)
        return self.of_batch(loss, output, loss.check_target(output, y))

    def of_batch(self, loss: Loss, output: Tensor, target: Tensor) -> Tensor:
        """Compute the same of a target that `loss.check_target` has gone over already.

        Parameters
        ----------
        loss : Loss
        output : Tensor of shape (n, ...)
        target : Tensor

        Returns
        -------
        Tensor of shape ()
        """
        if not self._seen:
            raise RuntimeError(
                "the penalty has seen no forward pass: call the network inside `with "
                "penalty.capture(module):` before each call of the penalty. (A compiled "
                "network may have been compiled without the hooks.)"
            )
        seen, self._seen = self._seen, []
        with torch.autocast(device_type=output.device.type, enabled=False):
            terms = [self._term(loss, output, target, *at) for at in seen]
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum()

    def _term(
        self, loss: Loss, output: Tensor, target: Tensor, name: str, layer: nn.Linear, seen: Tap
    ) -> Tensor:
        features, z = seen.check(name)
        if features.ndim != 2:
            raise ValueError(
                f"layer {name!r} received inputs of shape {tuple(features.shape)}; the penalty "
                "takes layers that see (n_samples, n_features) so far."
            )
        if not z.requires_grad:
            raise ValueError(
                f"there is nothing to train up to layer {name!r}: the forward pass ran without "
                "gradients, or all parameters up to there are frozen. Penalise a later layer; "
                "to measure, use relflat_sk.relative_flatness."
            )
        if z.grad_fn is not seen.node:
            raise ValueError(
                f"the output of layer {name!r} was overwritten in place (an activation with "
                "inplace=True?), but its curvature is needed. Use inplace=False, or penalise "
                "another layer."
            )
        weight = _full_precision(layer.weight)
        norms, weight = self._scale(_full_precision(features), weight)
        link = find_link(output, seen.node)
        closed = loss.closed_form(link, _full_precision(z), target)
        if closed is not None:
            assert loss.row is not None
            # the criterion has been evaluated by the training step already
            divisors = loss.row.divisors(loss.criterion, output, target)
            forms = summed_forms(closed, weight)
        else:
            losses, divisors = loss.terms(output, target)
            products = product_curvature(losses.sum(), z, differentiable=True)
            shape = (len(z), weight.shape[1], self.probes)
            signs = torch.randint(0, 2, shape, device=z.device).to(weight.dtype) * 2 - 1
            forms = products(weight @ signs).mean(dim=1)
        summed = getattr(loss.criterion, "reduction", "mean") == "sum"
        divisor = 2 * weight.shape[1] * (1 if summed else divisors.sum())
        return (norms @ forms) / divisor

    def _scale(self, features: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Squared feature norms and weight, in units of the features' spread if asked."""
        if self.normalize:
            variance = features.var(dim=0, correction=0)
            # rounding noise on a constant is no variation
            low, high = features.detach().aminmax(dim=0)
            eps = torch.finfo(features.dtype).eps
            varies = (high - low) > 8 * eps * torch.maximum(low.abs(), high.abs())
            spread = variance.where(varies, 1.0).sqrt()  # a root has no slope at zero
            features = (features / spread) * varies
            weight = weight * spread * varies
        return torch.linalg.vecdot(features, features), weight


def _linear(named: Mapping[str, nn.Module], name: str) -> nn.Linear:
    layer = named[name]
    check_unshared(name, named)
    if not isinstance(layer, nn.Linear):
        raise TypeError(
            f"layer {name!r} is a {type(layer).__name__}; the penalty takes nn.Linear layers so "
            "far. Penalise another layer."
        )
    return layer


def _same(ones: Sequence[nn.Module], others: Sequence[nn.Module]) -> bool:
    return len(ones) == len(others) and all(map(operator.is_, ones, others))


@contextmanager
def _watch(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, Tap]]:
    """Record what goes through each layer, in the order in which they are called.

    Does what `relflat_sk.layers.call_order` and `tap` do for one layer, with less to set up
    in each training step.
    """
    taps: dict[str, Tap] = {}
    handles = []
    for name, layer in layers.items():

        def after(
            module: nn.Module, args: Any, kwargs: Any, output: Tensor, name: str = name
        ) -> None:
            seen = taps.setdefault(name, Tap())
            seen.calls += 1
            seen.features = args[0] if args else next(iter(kwargs.values()))
            seen.version = seen.features._version
            seen.z, seen.node = output, output.grad_fn

        handles.append(layer.register_forward_hook(after, with_kwargs=True))
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()


def _full_precision(tensor: Tensor) -> Tensor:
    """Half-precision arrays as float32; others as they are."""
    return tensor.float() if tensor.dtype in {torch.float16, torch.bfloat16} else tensor

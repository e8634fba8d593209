"""Sum quantities over samples: exactly where that is cheap, by random probes otherwise.

All layers and quantities share one pass over the data, and where curvature comes from
gradients they share the backward passes too.
"""

import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from relflat_sk._network import Layer, Network
from relflat_sk._random import make_generator
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.measures._flatness.layer_curvature import LayerView, View, observe
from relflat_sk.measures._flatness.terms import Quantity

__all__ = ["METHODS", "Pass", "Sums", "sum_quantities"]

METHODS = ("auto", "exact", "hutchinson")

# backward passes or products that "auto" always affords, whatever the number of samples
_FEW = 64
_MAX_PROBES = 10_000
# numbers in the products that are taken at a time. Small ones cost their overhead: 16 of a
# layer's output of (16, 100) take a fifth of the time together, of (1024, 100) no less
_TOGETHER = {False: 2**17, True: 2**25}  # by whether on a GPU
# as many show the variance between a sample's probes, from which follows how many it takes
_PILOT = 2

Key = tuple[str, Hashable]  # layer, name of the quantity
Quantities = Callable[[LayerView], Mapping[Hashable, Quantity]]


@dataclass
class Sums:
    """The mean of a quantity, as the criterion averages."""

    value: Tensor  # (k,), float64
    stderr: Tensor  # (k,)
    method: str  # "closed form", "exact" or "hutchinson"


@dataclass
class Pass:
    """What a pass over the data showed beside the quantities."""

    divisor: float = 0.0
    loss: float = 0.0
    n_samples: int = 0
    output_shape: torch.Size = field(default_factory=torch.Size)
    link: str | None = None
    weights: dict[str, Tensor] = field(default_factory=dict)

    def look(self, view: View) -> None:
        """Add a batch."""
        self.divisor += view.divisor
        self.loss += view.loss
        self.n_samples += len(view)
        self.output_shape, self.link = view.output_shape, view.link
        if not self.weights:
            self.weights = {name: layer.weight for name, layer in view.layers.items()}


@dataclass
class _Probes:
    """Running mean and variance between a sample's probes, summed over samples."""

    total: Tensor | float = 0.0
    scatter: Tensor | float = 0.0
    done: int = 0
    freedom: int = 0

    def add(self, mean: Tensor, variance: Tensor, n_probes: int) -> None:
        self.total = self.total + n_probes * mean
        self.scatter = self.scatter + (n_probes - 1) * variance
        self.done += n_probes
        self.freedom += n_probes - 1

    def value(self) -> Tensor:
        return torch.as_tensor(self.total / self.done)

    def variance(self) -> Tensor:
        return torch.as_tensor(self.scatter / self.freedom)

    def stderr(self) -> Tensor:
        return (self.variance() / self.done).sqrt()

    def needed(self, rtol: float) -> float:
        """How many probes bring the standard error down to `rtol` of the value."""
        values, variances = self.value(), self.variance()
        at = int(values.argmax())  # one value, or the neuron that is least flat
        value, variance = float(values[at]), float(variances[at])
        if not math.isfinite(value) or variance == 0:
            return 0.0
        return variance / (rtol * value) ** 2 if value else math.inf


def sum_quantities(
    network: Network,
    layers: Sequence[Layer] | str,
    quantities: Quantities,
    *,
    method: str = "auto",
    n_probes: int | None = None,
    rtol: float = 0.01,
    random_state: int | np.random.RandomState | None = None,
) -> tuple[dict[Key, Sums], Pass]:
    """Average quantities over the data; to be used within `borrowed`.

    Parameters
    ----------
    network : Network
    layers : sequence of int, str or nn.Module, or "all"
    quantities : callable
        From the first view of a layer to its quantities by name.
    method, n_probes, rtol, random_state
        See `relflat_sk.relative_flatness`.

    Returns
    -------
    sums : dict of (layer name, quantity name) to Sums
    seen : Pass

    Raises
    ------
    ValueError
        If an argument is out of its range, or no sample counts.
    """
    _check_arguments(method, n_probes, rtol)
    most = {"auto": _FEW, "exact": math.inf, "hutchinson": 0}[method]
    exact = _Exact(quantities, most)
    sampled = _Sampled(quantities, make_generator(random_state, network.device))
    seen = Pass()
    for view in observe(network, layers):
        seen.look(view)
        exact.add(view)
        sampled.add(view, list(exact.left_out), _PILOT)
        del view
    if seen.divisor == 0:
        raise ValueError(
            "no sample counts in the mean loss: every label is ignored (ignore_index) or has "
            "weight zero."
        )
    sums = {
        key: Sums(total / seen.divisor, torch.zeros_like(total), exact.method[key])
        for key, total in exact.totals.items()
    }
    if exact.left_out:
        sampled.close_round(_PILOT)
        cap = n_probes or _MAX_PROBES
        too_dear = sampled.refine(network, exact.left_out, cap, rtol, method == "auto")
        sums |= sampled.sums(seen.divisor)
        if n_probes is None:
            for key in exact.left_out.keys() - too_dear:
                _warn_if_loose(key, sums[key], rtol, cap)
        sums |= _exactly(network, too_dear, quantities)
    return sums, seen


def _check_arguments(method: str, n_probes: int | None, rtol: float) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}.")
    if n_probes is not None and (not isinstance(n_probes, int) or n_probes < 2):
        raise ValueError(
            f"n_probes must be an integer of at least 2 (one probe has no error bar) or None, "
            f"got {n_probes!r}."
        )
    if not rtol > 0:
        raise ValueError(f"rtol must be positive, got {rtol!r}.")


class _Exact:
    """Exact sums of what takes at most so many backward passes per batch."""

    def __init__(self, quantities: Quantities, most: float) -> None:
        self.quantities = quantities
        self.most = most
        self.totals: dict[Key, Tensor] = {}
        self.method: dict[Key, str] = {}
        self.left_out: dict[Key, int] = {}  # and how many passes they would take
        self.plan: dict[str, Mapping[Hashable, Quantity]] = {}

    def add(self, view: View) -> None:
        by_gradients = []
        for name, layer in view.layers.items():
            if name not in self.plan:
                self.plan[name] = self.quantities(layer)
            for what, quantity in self.plan[name].items():
                key = name, what
                if key in self.left_out:
                    continue
                passes = _passes(view, layer, quantity)
                # with "hutchinson" even closed forms are probed, for whoever asks for it
                if passes > self.most or self.most == 0:
                    self.left_out[key] = passes
                elif layer.how == "closed form":
                    self._keep(key, view, quantity.closed(layer), "closed form")
                elif layer.how == "gradients":
                    by_gradients.append((key, quantity))
                else:
                    self._keep(key, view, _all_products(layer, quantity), "exact")
        if by_gradients:
            self._add_gradients(view, by_gradients)

    def _add_gradients(self, view: View, wanted: list[tuple[Key, Quantity]]) -> None:
        names = list(dict.fromkeys(name for (name, _), _ in wanted))
        for cotangent in view.root.unbind(dim=2):
            found = view.gradients(cotangent, names)
            for key, quantity in wanted:
                terms = quantity.gradient(view.layers[key[0]], found[key[0]])
                self._keep(key, view, terms, "exact")

    def _keep(self, key: Key, view: View, terms: Tensor, method: str) -> None:
        found = view.weighted_sum(terms)
        self.totals[key] = self.totals[key] + found if key in self.totals else found
        self.method[key] = method


def _passes(view: View, layer: LayerView, quantity: Quantity) -> int:
    if layer.how == "closed form":
        return 0
    if layer.how == "gradients":
        return view.root.shape[2]
    return quantity.n_products(layer)


def _all_products(layer: LayerView, quantity: Quantity) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    together = max(1, _TOGETHER[layer.bump.is_cuda] // layer.bump.numel())
    directions, index = quantity.directions(layer), 0
    while some := list(islice(directions, together)):
        for forms in layer.forms(some):
            total = quantity.collect(index, forms, total)
            index += 1
    return total


class _Sampled:
    """Random probes, drawn for each sample by itself, until the error bars are small."""

    def __init__(self, quantities: Quantities, generator: torch.Generator) -> None:
        self.quantities = quantities
        self.generator = generator
        self.plan: dict[str, Mapping[Hashable, Quantity]] = {}
        self.probes: dict[Key, _Probes] = {}
        self.round: dict[Key, tuple[Tensor, Tensor]] = {}

    def add(self, view: View, keys: Sequence[Key], n_probes: int) -> None:
        """Draw probes for the samples of a batch."""
        for name, _ in keys:
            if name not in self.plan:
                self.plan[name] = self.quantities(view.layers[name])
        running: dict[Key, tuple[Tensor, Tensor]] = {}
        for j in range(1, n_probes + 1):
            for key, draw in self._draw(view, keys).items():
                mean, squares = running.get(key, (draw * 0, draw * 0))
                shift = draw - mean
                mean = mean + shift / j
                running[key] = mean, squares + shift * (draw - mean)
        for key, (mean, squares) in running.items():
            weight = view.weights(len(mean))[:, None]
            total, spread = self.round.get(key, (0.0, 0.0))
            self.round[key] = (
                total + (weight * mean).sum(dim=0),
                spread + (weight.square() * squares).sum(dim=0) / (n_probes - 1),
            )

    def close_round(self, n_probes: int) -> None:
        """Take the sums over all samples of so many probes into account."""
        for key, (total, spread) in self.round.items():
            self.probes.setdefault(key, _Probes()).add(total, spread, n_probes)
        self.round = {}

    def refine(
        self, network: Network, passes: Mapping[Key, int], cap: int, rtol: float, or_exact: bool
    ) -> set[Key]:
        """Add rounds until error bars are small; return what is cheaper to sum exactly."""
        too_dear: set[Key] = set()
        keys, done = list(passes), _PILOT
        while True:
            needed = {key: self.probes[key].needed(rtol) for key in keys}
            if or_exact:
                # an error bar that costs more than no error at all is not worth having
                too_dear |= {key for key in keys if needed[key] > max(done, passes[key])}
            keys = [key for key in keys if needed[key] > done and key not in too_dear]
            if not keys or done + 2 > cap:
                return too_dear
            most = max(needed[key] for key in keys)
            missing = int(min(max(1.05 * most - done, 2), cap - done))
            for view in observe(network, list(dict.fromkeys(name for name, _ in keys))):
                self.add(view, keys, missing)
                del view
            self.close_round(missing)
            done += missing

    def sums(self, divisor: float) -> dict[Key, Sums]:
        """Means and standard errors so far."""
        return {
            key: Sums(found.value() / divisor, found.stderr() / abs(divisor), "hutchinson")
            for key, found in self.probes.items()
        }

    def _draw(self, view: View, keys: Sequence[Key]) -> dict[Key, Tensor]:
        names = dict.fromkeys(name for name, _ in keys)
        by_gradients = [name for name in names if view.layers[name].how == "gradients"]
        found = {}
        if by_gradients:
            # with signs s, E (R s)(R s)^T = R R^T: one backward pass for all layers
            shape = (len(view), view.root.shape[2], 1)
            signs = torch.randint(
                0, 2, shape, generator=self.generator, device=self.generator.device
            )
            cotangent = (view.root @ (2.0 * signs.double() - 1))[:, :, 0]
            found = view.gradients(cotangent, by_gradients)
        drawn = {}
        for name, what in keys:
            quantity, layer = self.plan[name][what], view.layers[name]
            if name in found:
                drawn[name, what] = quantity.gradient(layer, found[name])
            else:
                drawn[name, what] = quantity.draw(layer, self.generator)
        return drawn


def _exactly(network: Network, keys: set[Key], quantities: Quantities) -> dict[Key, Sums]:
    if not keys:
        return {}

    def only(layer: LayerView) -> Mapping[Hashable, Quantity]:
        found = quantities(layer)
        return {what: found[what] for what in found if (layer.name, what) in keys}

    sums, _ = sum_quantities(network, sorted({name for name, _ in keys}), only, method="exact")
    return sums


def _warn_if_loose(key: Key, found: Sums, rtol: float, cap: int) -> None:
    at = int(found.value.argmax())
    value, stderr = float(found.value[at]), float(found.stderr[at])
    if stderr > rtol * abs(value):
        warnings.warn(
            f"{cap} probes left a standard error of {stderr:.3g} on a {key[1]} of {value:.3g} "
            f"at layer {key[0]!r}, more than rtol={rtol:g} asks for; use method='exact'.",
            FlatnessWarning,
            stacklevel=5,
        )

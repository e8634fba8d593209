"""Sum quantities over samples: exactly where that is cheap, by random probes otherwise.

All layers and quantities share one pass over the data, and where curvature comes from
gradients they share the backward passes too.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from relflat_sk._checks import check_integer, check_number
from relflat_sk._network import Network
from relflat_sk._warnings import warn
from relflat_sk.measures._flatness.layer_curvature import LayerView, View, scan
from relflat_sk.measures._flatness.summary import Summary
from relflat_sk.measures._flatness.terms import Quantity

__all__ = ["METHODS", "Summation", "Sums"]

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


class Summation:
    """Sums of quantities over the data, filled batch by batch.

    Parameters
    ----------
    network : Network
        The network, with its loss and data.
    quantities : callable
        From the first view of a layer to its quantities by name.
    method, n_probes, rtol
        See `relflat_sk.relative_flatness`.
    generator : torch.Generator
        Draws the random probes.

    Raises
    ------
    ValueError
        If an argument is out of its range.
    """

    def __init__(
        self,
        network: Network,
        quantities: Quantities,
        *,
        method: str,
        n_probes: int | None,
        rtol: float,
        generator: torch.Generator,
    ) -> None:
        _check_arguments(method, n_probes, rtol)
        most = {"auto": _FEW, "exact": math.inf, "hutchinson": 0}[method]
        self.network = network
        self.quantities = quantities
        self.method = method
        self.n_probes = n_probes
        self.rtol = rtol
        self._exact = _Exact(quantities, most)
        self._sampled = _Sampled(quantities, generator)

    def can_sum(self, view: View, layer: LayerView, quantity: Quantity) -> bool:
        """Return whether a quantity is summed exactly, in the pass over the data itself.

        Parameters
        ----------
        view : View
            The forward pass of a batch.
        layer : LayerView
            One of its layers.
        quantity : Quantity
            A quantity at this layer.

        Returns
        -------
        bool
            False if it is estimated by random probes.
        """
        return self._exact.can_afford(_passes(view, layer, quantity))

    def add(self, view: View) -> None:
        """Add a batch.

        Parameters
        ----------
        view : View
            The forward pass of the batch.
        """
        self._exact.add(view)
        self._sampled.add(view, list(self._exact.to_draw), _PILOT)

    def finish(self, summary: Summary) -> dict[Key, Sums]:
        """Average over the data, with as many further passes as the probes need.

        Parameters
        ----------
        summary : Summary
            Totals of the pass whose batches were added.

        Returns
        -------
        dict of (layer name, quantity name) to Sums
            Without the quantities that can neither be summed in one pass nor be drawn.
        """
        exact, sampled = self._exact, self._sampled
        sums = {
            key: Sums(total / summary.divisor, torch.zeros_like(total), exact.method[key])
            for key, total in exact.totals.items()
        }
        if exact.to_draw:
            sampled.close_round(_PILOT)
            cap = self.n_probes or _MAX_PROBES
            or_exact = self.method == "auto"
            too_dear = sampled.refine(self.network, exact.to_draw, cap, self.rtol, or_exact)
            sums |= sampled.sums(summary.divisor)
            if self.n_probes is None:
                for key in exact.to_draw.keys() - too_dear:
                    _warn_if_loose(key, sums[key], self.rtol, cap)
            sums |= self._exactly(too_dear)
        return sums

    def _exactly(self, keys: set[Key]) -> dict[Key, Sums]:
        """Sum some quantities exactly, in one more pass."""
        if not keys:
            return {}

        def only(layer: LayerView) -> Mapping[Hashable, Quantity]:
            found = self.quantities(layer)
            return {what: found[what] for what in found if (layer.name, what) in keys}

        again = Summation(
            self.network,
            only,
            method="exact",
            n_probes=None,
            rtol=self.rtol,
            generator=self._sampled.generator,
        )
        summary = Summary()
        layers = sorted({name for name, _ in keys})
        scan(self.network, layers, summary.add, again.add)
        return again.finish(summary)


def _check_arguments(method: str, n_probes: int | None, rtol: float) -> None:
    """Refuse arguments out of their range."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}.")
    check_integer(
        "n_probes", n_probes, minimum=2, optional=True, reason="one probe has no standard error"
    )
    check_number("rtol", rtol)


class _Exact:
    """Exact sums of what takes at most so many backward passes per batch."""

    def __init__(self, quantities: Quantities, most: float) -> None:
        self.quantities = quantities
        self.most = most
        self.totals: dict[Key, Tensor] = {}
        self.method: dict[Key, str] = {}
        self.to_draw: dict[Key, float] = {}  # and how many passes they would take
        self.left_out: set[Key] = set()  # can neither be summed nor drawn
        self.plan: dict[str, Mapping[Hashable, Quantity]] = {}

    def add(self, view: View) -> None:
        by_gradients = []
        for name, layer in view.layers.items():
            if name not in self.plan:
                self.plan[name] = self.quantities(layer)
            for what, quantity in self.plan[name].items():
                key = name, what
                if key in self.to_draw or key in self.left_out:
                    continue
                passes = _passes(view, layer, quantity)
                if not self.can_afford(passes):
                    self._leave_out(key, quantity, passes)
                elif layer.how == "closed form":
                    self._keep(key, view, quantity, quantity.closed(layer), "closed form")
                elif layer.how == "gradients":
                    by_gradients.append((key, quantity))
                else:
                    self._keep(key, view, quantity, _all_products(layer, quantity), "exact")
        if by_gradients:
            self._add_gradients(view, by_gradients)

    def can_afford(self, passes: float) -> bool:
        """Return whether a quantity that takes so many passes for a batch is summed exactly."""
        # with "hutchinson" even closed forms are probed, at the user's request
        return passes <= self.most and self.most > 0 and math.isfinite(passes)

    def _leave_out(self, key: Key, quantity: Quantity, passes: float) -> None:
        """Note that a quantity is not summed exactly."""
        if quantity.can_be_drawn:
            self.to_draw[key] = passes
        else:
            self.left_out.add(key)
            self.totals.pop(key, None)

    def _add_gradients(self, view: View, wanted: list[tuple[Key, Quantity]]) -> None:
        names = list(dict.fromkeys(name for (name, _), _ in wanted))
        terms: dict[Key, Tensor] = {}
        for cotangent in view.root.unbind(dim=2):
            found = view.gradients(cotangent, names)
            for key, quantity in wanted:
                more = quantity.gradient(view.layers[key[0]], found[key[0]])
                terms[key] = terms[key] + more if key in terms else more
        for key, quantity in wanted:
            self._keep(key, view, quantity, terms[key], "exact")

    def _keep(self, key: Key, view: View, quantity: Quantity, terms: Tensor, method: str) -> None:
        weights = view.weights(len(terms))
        found = quantity.sum_terms(view.layers[key[0]], terms.double(), weights)
        self.totals[key] = self.totals[key] + found if key in self.totals else found
        self.method[key] = method


def _passes(view: View, layer: LayerView, quantity: Quantity) -> float:
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
        self, network: Network, passes: Mapping[Key, float], cap: int, rtol: float, or_exact: bool
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
            names = list(dict.fromkeys(name for name, _ in keys))
            scan(network, names, partial(self.add, keys=keys, n_probes=missing))
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


def _warn_if_loose(key: Key, found: Sums, rtol: float, cap: int) -> None:
    at = int(found.value.argmax())
    value, stderr = float(found.value[at]), float(found.stderr[at])
    if stderr > rtol * abs(value):
        warn(
            f"{cap} probes left a standard error of {stderr:.3g} on a {key[1]} of {value:.3g} "
            f"at layer {key[0]!r}, more than rtol={rtol:g} asks for; use method='exact'."
        )

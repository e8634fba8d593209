"""Scales of values in a forward pass, and the changes of layers that they ask for.

See `relflat_sk._rescaling.reparameterization` for the notation.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["KINDS", "ONE", "Change", "Kind", "Scale"]

Floats = NDArray[np.float64]

_PRODUCT_TOLERANCE = 1e-6  # of factors multiplied in float32; the last layer absorbs the rest
_ROUNDING = 1e-12  # of two scales multiplied in float64 along different branches


@dataclass(frozen=True, eq=False)
class Scale:
    """A value of the rescaled network divided by that of the original. Shapes: `values` (k,)."""

    values: Floats
    layout: str = "last"
    ndim: int = 2

    @property
    def is_one(self) -> bool:
        """Whether nothing is rescaled."""
        return bool((self.values == 1).all())

    @property
    def is_uniform(self) -> bool:
        """Whether one number holds for all neurons."""
        return len(self.values) == 1

    def spread(self, n: int) -> Floats | None:
        """Return the scales of n features, each that of its neuron. Shapes: returns (n,)."""
        k = len(self.values)
        if k in {1, n}:
            return np.broadcast_to(self.values, n)
        if n % k or self.layout not in {"blocks", "tiles"}:
            return None
        blocks = self.layout == "blocks"
        return np.repeat(self.values, n // k) if blocks else np.tile(self.values, n // k)

    def equals(self, other: "Scale") -> bool:
        """Return whether values of both scales can be added number by number."""
        return (
            self.values.shape == other.values.shape
            and (self.is_uniform or (self.layout, self.ndim) == (other.layout, other.ndim))
            and bool(np.isclose(self.values, other.values, rtol=_ROUNDING, atol=0).all())
        )


ONE = Scale(np.ones(1))


@dataclass(frozen=True, eq=False)
class Change:
    """The change of one layer. Shapes: `rows`, `after` (d,), `columns` (k,)."""

    rows: Floats
    columns: Floats
    after: Floats

    @property
    def is_none(self) -> bool:
        """Whether the layer stays as it is."""
        return all(bool((part == 1).all()) for part in (self.rows, self.columns, self.after))


def _plan_layer(before: Scale, features: int, factor: Floats | None) -> Change:
    """Plan to multiply the whole weight."""
    rows = np.ones(1) if factor is None else factor
    after = before.values * rows
    if abs(after[0] - 1) <= _PRODUCT_TOLERANCE:
        after = np.ones(1)
        rows = after / before.values
    return Change(rows, np.ones(1), after)


def _plan_neurons(before: Scale, features: int, factor: Floats | None) -> Change | None:
    """Plan to multiply rows, and to divide columns by the scales of the neurons they read."""
    columns = before.spread(features)
    rows = np.ones(1) if factor is None else factor
    return None if columns is None else Change(rows, columns, rows)


_Plan = Callable[[Scale, int, Floats | None], Change | None]


@dataclass(frozen=True)
class Kind:
    """A kind of rescaling."""

    plan: _Plan
    unfinished: str


KINDS = {
    "layer": Kind(
        _plan_layer,
        "the factors multiply to {after:.10g} on the way to the network's output, behind layer "
        "{name!r}; their product must be 1.",
    ),
    "neuron": Kind(
        _plan_neurons,
        "layer {name!r} has no layer behind it in which the factors of its output neurons could "
        "be undone; give factors for layers before it.",
    ),
}

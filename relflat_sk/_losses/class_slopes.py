r"""Gradients of a sum of variances of rows under a softmax, over chunks of very many classes.

For the sums, and the notation, see `relflat_sk._losses.class_chunks`. With the mean row ``xbar =
sum_k p_k x_k`` of a sample, the gradients of its ``V`` are ``p_k (|x_k - xbar|^2 - V)`` in the
logits and ``2 p_k (x_k - xbar)`` in the rows. Those of the most probable class come from ``x_t -
xbar = g (U x_t - S)``, where nothing cancels.

The gradient in the rows is as large as the weight, and that of the loss is, too. A training step
needs only their sum. So the layer's own call, a `Head`, adds up both of them chunk by chunk.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from relflat_sk._losses.class_chunks import Rows, Sums, chunks
from relflat_sk._numerics import full_precision, inverse_spread, without_autocast

__all__ = ["ClassSlopes", "Head", "Slot"]


@dataclass(frozen=True)
class ClassSlopes:
    """The gradients of ``sum_i outer_i V_i``. Shapes: `z` (n, d), `outer` (n, 1)."""

    z: Tensor
    rows: Rows
    sums: Sums
    outer: Tensor

    @cached_property
    def variances(self) -> Tensor:
        """The variances ``V``: (n, 1), float64."""
        return self.sums.variances().sum(dim=1, keepdim=True)

    @cached_property
    def _away(self) -> Tensor:
        """Rows of the most probable classes, as distances from the mean rows: (n, m)."""
        _, g = self.sums.odds.shares(self.sums.total)
        return g * (self.sums.total * self.sums.row - self.sums.first)

    @cached_property
    def _mean(self) -> Tensor:
        """The mean rows: (n, m)."""
        return self._cast(self.sums.row - self._away)

    @cached_property
    def _top(self) -> Tensor:
        """What multiplies the most probable class: (n, 1)."""
        return self.outer * self.sums.odds.shares(self.sums.total)[0]

    @cached_property
    def _others(self) -> Tensor:
        """What multiplies ``u`` of the other classes: (n, 1)."""
        return self._cast(self.outer * self.sums.odds.shares(self.sums.total)[1])

    def _cast(self, array: Tensor) -> Tensor:
        return array.to(self.rows.centre.dtype)

    def of_logits(self) -> Tensor:
        """Compute the gradient in the logits. Shapes: returns (n, d)."""
        z, rows, odds, mean = self.z, self.rows, self.sums.odds, self._mean
        offset = self._cast(mean.double().square().sum(dim=1, keepdim=True) - self.variances)
        slopes = torch.empty_like(z)
        with without_autocast(z):
            for part in chunks(len(z), rows.factor):
                shares = odds.others(z, part).mul_(self._others)
                distances = torch.addmm(rows.norms[part].T, mean, rows[part].T, alpha=-2)
                slopes[:, part] = distances.add_(offset).mul_(shares)
        gaps = self._away.square().sum(dim=1, keepdim=True) - self.variances
        return slopes.scatter_(1, odds.top, (self._top * gaps).to(slopes.dtype))

    def of_rows(self, part: slice) -> Tensor:
        """Compute the gradient in the weight for some classes, with the logits held fixed.

        Shapes: returns (c, m).
        """
        shares, x = self.sums.odds.others(self.z, part).mul_(self._others), self.rows[part]
        x.mul_(2 * shares.sum(dim=0)[:, None]).addmm_(shares.T, self._mean, alpha=-2)
        at = self.sums.odds.top[:, 0] - part.start
        inside = (at >= 0) & (at < len(x))
        of_top = (2 * self._top * self._away).masked_fill(~inside[:, None], 0)
        x.index_add_(0, at.clamp(0, len(x) - 1), self._cast(of_top))
        return self.rows.stretch(x)

    def of_weight(
        self, outer: Tensor, of_z: Tensor | None = None, features: Tensor | None = None
    ) -> Tensor:
        """Compute the gradient in the weight, together with another one that comes from logits.

        Shapes: `of_z` (n, d), `features` (n, m); returns (d, m).
        """
        scaled, found = replace(self, outer=self.outer * outer), torch.empty_like(self.rows.factor)
        with without_autocast(self.z):
            for part in chunks(len(self.z), found):
                some = scaled.of_rows(part)
                if of_z is not None and features is not None:
                    some.addmm_(of_z[:, part].T.to(some.dtype), features.to(some.dtype))
                found[part] = some
        return found

    def of_spread(self) -> Tensor:
        """Compute the gradient in the spread of the columns, from sums column by column.

        Shapes: returns (m,).
        """
        assert self.rows.spread is not None
        summed = (self.outer * self.sums.variances()).sum(dim=0)
        return self._cast(2 * summed * inverse_spread(self.rows.spread))


class Slot:
    """A place for what a `Head` and the limit of a penalty need to know of the penalty."""

    def __init__(self) -> None:
        self.slopes: ClassSlopes | None = None
        self.of_z: Tensor | None = None
        self.direct: list[tuple[Tensor, Tensor]] = []


class Head(NamedTuple):
    """The call of a linear layer that puts out the logits of very many classes."""

    handle: Tensor | None
    slot: Slot

    @classmethod
    def of(
        cls, features: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor
    ) -> tuple[Tensor, "Head"]:
        """Give a layer's output a gradient that waits for that of the penalty.

        Shapes: `features` (..., m), `weight` (d, m), `bias` (d,), `z` (..., d); returns z (...,
        d).
        """
        slot = Slot()
        z, handle = _Linear.apply(  # type: ignore[no-untyped-call]
            features, weight, bias, z.detach(), slot
        )
        return z, cls(handle, slot)


class _Linear(torch.autograd.Function):
    """The output of a linear layer, with the handle of a `Head`."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, slot: Slot
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(features, weight)
        ctx.slot, ctx.bias_type = slot, None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(z)
        return z, full_precision(z).new_zeros(())

    @staticmethod
    def backward(ctx: Any, of_z: Tensor | None, outer: Tensor | None) -> tuple[Tensor | None, ...]:
        features, weight = ctx.saved_tensors
        in_features, in_weight, in_bias = ctx.needs_input_grad[:3]
        of_features = of_weight = of_bias = rows = None
        if of_z is not None:
            rows = of_z.flatten(0, -2)
            if in_features:
                of_features = (of_z @ weight.to(of_z.dtype)).to(features.dtype)
            if in_bias:
                of_bias = rows.sum(dim=0).to(ctx.bias_type)
            if in_weight and outer is None:
                of_weight = (rows.T @ features.to(of_z.dtype).flatten(0, -2)).to(weight.dtype)
        if in_weight and outer is not None:
            of_weight = ctx.slot.slopes.of_weight(outer, rows, features.flatten(0, -2))
        return of_features, of_weight, of_bias, None, None

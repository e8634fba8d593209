r"""What the measures of the papers' Table 1 sum over samples, layer by layer.

With ``B_i = sum_c g_ic g_ic^T`` (see `layer_curvature`) and ``G_ic = sum_p g_icp phi_ip^T``,
the gradient in the weight matrix that belongs to ``g_ic``, the Hessian of the loss in the
weight of the layer is ``H = mean_i sum_c vec(G_ic) vec(G_ic)^T``, so that for any ``F``,
``D``

.. math:: \sum_{k,t} (F_k D_{tt} e_t^\top)^\top H (F_k D_{tt} e_t^\top)
    = \mathrm{mean}_i \sum_c \|F^\top G_{ic} D\|_F^2 .

That is the trace of ``H`` for ``F = I`` and relative flatness for ``F F^T = W W^T``. Each
quantity below knows that sum in the four ways it can be had: from a closed form, from
gradients, from all Hessian-vector products it takes, and from random ones. `FeaturePairs` is
summed from the first two only.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from relflat_sk._numerics import inverse_spread
from relflat_sk.measures._flatness.layer_curvature import LayerView

__all__ = ["FeaturePairs", "Neurons", "Quantity", "Trace", "left_factor"]


class Quantity(Protocol):
    """A sum over samples of one or several numbers at one layer."""

    @property
    def can_be_drawn(self) -> bool:
        """Whether there are products to sum, or to draw at random, where nothing else works."""

    def closed(self, view: LayerView) -> Tensor:
        """Each sample's terms from the layer's closed form: (n, k)."""

    def gradient(self, view: LayerView, found: Tensor) -> Tensor:
        """Each sample's terms that belong to what `View.gradients` found: (n, k)."""

    def sum_terms(self, view: LayerView, terms: Tensor, weights: Tensor) -> Tensor:
        """Sum the terms over samples with the weights (n,): one number or several."""

    def directions(self, view: LayerView) -> Iterator[Tensor]:
        """Yield changes of the layer's output (rows), whose forms sum up to the terms."""

    def collect(self, index: int, forms: Tensor, total: Tensor) -> Tensor:
        """Add the forms (n,) of the direction of that index to the terms."""

    def n_products(self, view: LayerView) -> float:
        """How many directions there are; infinity without any."""

    def draw(self, view: LayerView, generator: torch.Generator) -> Tensor:
        """Each sample's terms, unbiased, from one random product: (n, k)."""


class _PerSample:
    """A quantity whose sum over samples is the weighted sum of its terms."""

    can_be_drawn = True

    def sum_terms(self, view: LayerView, terms: Tensor, weights: Tensor) -> Tensor:
        return weights @ terms


@dataclass(frozen=True)
class Trace(_PerSample):
    """``sum_c |F^T G_c D|^2``; with F = I the trace of the Hessian.

    Parameters
    ----------
    factor : Tensor of shape (d, k), optional
        ``F``, the identity if None.
    inverse : Tensor of shape (m,) or (d, m), optional
        The diagonal of ``D``, ones if None; with grouped convolutions one for each row.
    """

    factor: Tensor | None = None
    inverse: Tensor | None = None

    def closed(self, view: LayerView) -> Tensor:
        assert view.closed is not None
        if self.factor is None:
            forms = view.closed.diagonal().sum(dim=1)
        else:
            forms = view.closed(self.factor).sum(dim=1)
        return (self._norms(view) * forms)[:, None]

    def gradient(self, view: LayerView, found: Tensor) -> Tensor:
        if view.flat:
            left = found[:, :, 0].double()
            left = left if self.factor is None else left @ self.factor
            return (self._norms(view) * left.square().sum(dim=1))[:, None]
        if self.inverse is not None:
            found = found * self.inverse.to(found.dtype)
        return self._left(found).double().square().sum(dim=(1, 2))[:, None]

    def _left(self, array: Tensor) -> Tensor:
        return array if self.factor is None else self.factor.T.to(array.dtype) @ array

    def _columns(self, view: LayerView) -> Tensor:
        if self.factor is not None:
            return self.factor
        return torch.eye(len(view.weight), dtype=view.weight.dtype, device=view.weight.device)

    def _scale(self, view: LayerView) -> Tensor:
        ones = torch.ones_like(view.weight)
        return ones if self.inverse is None else ones * self.inverse

    def n_products(self, view: LayerView) -> int:
        k = len(view.weight) if self.factor is None else self.factor.shape[1]
        return k if view.flat else k * view.weight.shape[1]

    def directions(self, view: LayerView) -> Iterator[Tensor]:
        columns, scale = self._columns(view), self._scale(view)
        n = len(view.features)
        for column in columns.T:
            if view.flat:
                yield column.expand(n, -1)[:, :, None] * self._norms(view).sqrt()[:, None, None]
                continue
            for t in range(scale.shape[1]):
                matrix = torch.zeros_like(view.weight)
                matrix[:, t] = column * scale[:, t]
                yield view.map.apply(view.features, matrix.to(view.features.dtype))

    def collect(self, index: int, forms: Tensor, total: Tensor) -> Tensor:
        return total + forms[:, None]

    def draw(self, view: LayerView, generator: torch.Generator) -> Tensor:
        columns, n = self._columns(view), len(view.features)
        k, m = columns.shape[1], view.weight.shape[1]
        if view.flat:
            rows = (_signs((n, k), generator) @ columns.T)[:, :, None]
            rows = rows * self._norms(view).sqrt()[:, None, None]
        else:
            matrices = (columns @ _signs((n, k, m), generator)) * self._scale(view)
            rows = view.map.apply(view.features, matrices.to(view.features.dtype))
        return _forms(view, rows)[:, None]

    def _norms(self, view: LayerView) -> Tensor:
        if self.inverse is None:
            norm: Tensor = torch.linalg.vector_norm(view.features, dim=1, dtype=torch.float64)
            return norm.square()
        return (view.features.double() * self.inverse).square().sum(dim=1)


@dataclass(frozen=True)
class Neurons(_PerSample):
    """``rho(j) = (W e_j e_j^T)^T H (W e_j e_j^T)`` of each input neuron j, or their sum.

    Parameters
    ----------
    total : bool
        Whether to sum over j.
    """

    total: bool

    def _finish(self, terms: Tensor) -> Tensor:
        return terms.sum(dim=1, keepdim=True) if self.total else terms

    def closed(self, view: LayerView) -> Tensor:
        assert view.closed is not None
        return self._finish(view.closed(view.weight) * view.features.double().square())

    def gradient(self, view: LayerView, found: Tensor) -> Tensor:
        weight = view.weight.to(found.dtype)
        if view.flat:
            along = (found[:, :, 0] @ weight) * view.features
        else:
            along = (found * weight).sum(dim=1)
        return self._finish(along.double().square())

    def n_products(self, view: LayerView) -> int:
        return view.weight.shape[1]

    def directions(self, view: LayerView) -> Iterator[Tensor]:
        for j in range(view.weight.shape[1]):
            matrix = torch.zeros_like(view.weight)
            matrix[:, j] = view.weight[:, j]
            yield view.map.apply(view.features, matrix.to(view.features.dtype))

    def collect(self, index: int, forms: Tensor, total: Tensor) -> Tensor:
        if self.total:
            return total + forms[:, None]
        return torch.cat([total, forms[:, None]], dim=1) if index else forms[:, None]

    def draw(self, view: LayerView, generator: torch.Generator) -> Tensor:
        n, m = len(view.features), view.weight.shape[1]
        signed = view.weight * _signs((n, m), generator)[:, None]
        rows = view.map.apply(view.features, signed.to(view.features.dtype))
        back = view.map.transpose(view.features, view.product(rows))
        return self._finish((back.double() * signed).sum(dim=1))


@dataclass(frozen=True)
class FeaturePairs:
    """``M_tj = mean_i phi_it^2 (w_j^T B_i w_j)``, with ``w_j`` the columns of ``W``: (m, m).

    From ``M`` and the features' standard deviations ``s`` the normalised flatness follows as
    ``sum_tj (s_j / s_t)^2 M_tj``, so that both can be had in one pass over the data. Only for
    layers with one position for each sample, from closed forms or gradients.
    """

    can_be_drawn = False

    def closed(self, view: LayerView) -> Tensor:
        assert view.closed is not None
        return view.closed(view.weight)

    def gradient(self, view: LayerView, found: Tensor) -> Tensor:
        return (found[:, :, 0].double() @ view.weight).square()

    def sum_terms(self, view: LayerView, terms: Tensor, weights: Tensor) -> Tensor:
        squares = view.features.double().square() * weights[:, None]
        return (squares.T @ terms).flatten()

    def n_products(self, view: LayerView) -> float:
        return math.inf

    def directions(self, view: LayerView) -> Iterator[Tensor]:
        raise NotImplementedError

    def collect(self, index: int, forms: Tensor, total: Tensor) -> Tensor:
        raise NotImplementedError

    def draw(self, view: LayerView, generator: torch.Generator) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def normalized(pairs: Tensor, spread: Tensor) -> Tensor:
        """Return the normalised flatness, given M (m * m,) and the deviations s (m,)."""
        ratios = inverse_spread(spread).square()[:, None] * spread.square()
        return (ratios.flatten() * pairs).sum()[None]


def left_factor(weight: Tensor) -> Tensor:
    """Return a matrix F with min(d, m) columns and F F^T = W W^T."""
    d, m = weight.shape
    if d >= m:
        return weight
    factor: Tensor = torch.linalg.qr(weight.T, mode="r").R.T  # W = R^T Q^T
    return factor


def _forms(view: LayerView, rows: Tensor) -> Tensor:
    return (view.product(rows).double() * rows).sum(dim=(1, 2))


def _signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Rademacher signs in float64."""
    draws = torch.randint(0, 2, shape, generator=generator, device=generator.device)
    return 2.0 * draws.double() - 1

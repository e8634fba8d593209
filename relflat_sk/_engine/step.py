"""A training step of several networks: losses, penalties with their limits, gradients."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from relflat_sk._engine.job import Job
from relflat_sk._losses.curvature import ArrayLoss, namespace
from relflat_sk._numerics import dots
from relflat_sk._penalty.limit import Measured, PenaltyLimit, as_kind


class StepBatch(NamedTuple):
    """A batch of each network."""

    inputs: Any  # (k, n, ...)
    targets: Any  # (k, n, ...)
    shares: Any  # (k, n), the weights divided by their sum


class Own:
    """The tensors of one network and its own optimizer."""

    def __init__(self, job: Job) -> None:
        parameters = job.parts.parameters
        self.weights = {name: p.detach()[None] for name, p in parameters}
        first = parameters[0][1]
        self.slopes = first.new_zeros(1, sum(p.numel() for _, p in parameters))
        self.gradients = split_rows(self.slopes, parameters)
        for name, p in parameters:
            p.grad = self.gradients[name][0]
        self.step = bare_step(job.optimizer)

    def hand_over(self) -> None:
        """Do nothing: these are the network's tensors."""


def split_rows(rows: Tensor, named: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return views of rows, (..., p), in the shapes of a network's parameters."""
    pieces = torch.split(rows, [p.numel() for _, p in named], dim=-1)
    return {
        name: piece.view(*rows.shape[:-1], *p.shape)
        for (name, p), piece in zip(named, pieces, strict=True)
    }


def bare_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Return the step of an optimizer, without what torch wraps around it for its profiler."""
    if "step" in vars(optimizer):  # such as a scheduler's
        return optimizer.step
    return partial(inspect.unwrap(type(optimizer).step), optimizer)


class Settings(NamedTuple):
    """The weights and the limits of the networks' penalties in an epoch."""

    factors: Any  # (k,)
    clips: Any  # (k,), or a number
    limit: PenaltyLimit
    every: int  # steps from one penalty to the next


def settings_of(penalties: Sequence[Any], like: Any) -> Settings | None:
    """Read the penalties of networks of one kind, as arrays of the kind of another one."""
    if not penalties:
        return None
    first = penalties[0]
    clips, limit = first.clip, first.limit
    if len(penalties) > 1:
        limit = PenaltyLimit.stack([penalty.limit for penalty in penalties], like)
        if clips is not None:
            clips = as_kind([penalty.clip for penalty in penalties], like)
    factors = as_kind([first.every * penalty.weight for penalty in penalties], like)
    return Settings(factors, clips, limit, first.every)


class Body(Protocol):
    """Networks with their weights."""

    weights: dict[str, Any]
    slopes: Any  # (k, p), the gradients of all weights

    def forward(self, x: Any) -> tuple[Any, Any, Any]:
        """Compute outputs, and return them with the features and the weight of the last layer."""

    def backward(
        self, z: Any, phi: Any = None, weight: Any = None, earlier: "EarlierTerm | None" = None
    ) -> None:
        """Compute the gradients of the weights, from the whole gradient in the output.

        `phi` and `weight` are added to the gradients in features and weight of the last layer, and
        those of `earlier` to the gradients in its layers.
        """


class EarlierTerm(NamedTuple):
    """A penalty at earlier layers by its partial derivatives, times the networks' factors."""

    z: Any  # (k, n, d), in the outputs
    weights: dict[int, Any]  # (k, d, m), in the weights of layers
    of_features: dict[int, Any]  # (k, n, 1); the derivative in a layer's input is that times it

    def plus(self, other: "EarlierTerm") -> "EarlierTerm":
        """Add the derivatives of another penalty at these layers."""
        weights, of_features = (
            {i: mine[i] + theirs[i] for i in mine}
            for mine, theirs in zip(self[1:], other[1:], strict=True)
        )
        return EarlierTerm(self.z + other.z, weights, of_features)


# from shares of the penalties, (k,), to the derivatives of what is left
EarlierSlopes = Callable[[Any], EarlierTerm]
# from a batch, the networks' factors, (k,), and what outputs predict, to penalties, (k,)
EarlierTerms = Callable[[StepBatch, Any, Any], tuple[Any, EarlierSlopes]]


class Step:
    """Training steps, with penalties at the last layer, at earlier ones, or without."""

    def __init__(
        self,
        body: Body,
        loss: ArrayLoss,
        *,
        at_last: bool = True,
        earlier: EarlierTerms | None = None,
    ) -> None:
        self._body, self._loss = body, loss
        self._at_last, self._earlier = at_last, earlier

    def __call__(self, batch: StepBatch, settings: Settings | None) -> tuple[Any, ...]:
        """Write the gradients of a batch; return losses, penalties and shares of them."""
        body = self._body
        z, phi, weight = body.forward(batch.inputs)
        loss, of_z, p = self._loss.slopes(z, batch.targets, batch.shares)
        if settings is None:
            body.backward(of_z)
            zeros = namespace(loss).zeros_like(loss)
            return loss, zeros, zeros + 1
        divisor = self._loss.divisor(z.shape[-1])
        penalty: Any = 0
        term = of_earlier = None
        if self._earlier is not None:
            penalty, of_earlier = self._earlier(batch, settings.factors / divisor, p)
        if self._at_last:
            factors = settings.factors / (2 * phi.shape[-1] * divisor)
            term = self._loss.trace_term(p, phi, weight, batch.shares[..., None])
            penalty = penalty + factors * term.value

        def differentiate(of_z: Any, shares: Any) -> None:
            """Write the gradients of losses, given those in outputs, and of shares of penalties."""
            earlier = None if of_earlier is None else of_earlier(shares)
            if earlier is not None:
                of_z = of_z + earlier.z
            if term is None:
                body.backward(of_z, earlier=earlier)
                return
            each = (shares * factors)[:, None, None]
            of_phi = (each * term.of_phi) * phi
            body.backward(of_z + each * term.z, of_phi, each * term.weight, earlier)

        limit, measured = settings.limit, None
        if settings.clips is None:
            share = namespace(penalty).ones_like(penalty)
        else:
            of_constant = self._loss.of_constant(z, batch.targets, batch.shares)
            if limit.needs_measurement:
                differentiate(0 * of_z, namespace(penalty).ones_like(penalty))
                of_penalty = 1 * body.slopes
                body.backward(of_z)
                measured = Measured(_norm(body.slopes), _norm(of_penalty), _rows(body.weights))
            share = limit.share(loss, of_constant, penalty, settings.clips, measured)
        if measured is None:
            differentiate(of_z, share)
        else:
            body.slopes += share[:, None] * of_penalty
        return loss, penalty, share


def _rows(weights: Mapping[str, Any]) -> Any:
    """Join the weights of each network in a row: (k, p)."""
    rows = [array.reshape(len(array), -1) for array in weights.values()]
    return namespace(rows[0]).concatenate(rows, axis=1)


def _norm(rows: Any) -> Any:
    """Compute the norms of rows: (k, p) to (k,)."""
    return namespace(rows).sqrt(dots(rows, rows))

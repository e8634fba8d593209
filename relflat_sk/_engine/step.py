"""A training step of several networks: losses, penalties with their limits, gradients."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from relflat_sk._engine.job import Job
from relflat_sk._losses.array_losses import ArrayLoss, namespace
from relflat_sk._penalty.limit import Measured, PenaltyLimit, as_kind


class StepBatch(NamedTuple):
    """A batch of each network.

    `shares` are the weights divided by their sum. Shapes: `inputs`, `targets` (k, n, ...),
    `shares`, `weights` (k, n).
    """

    inputs: Any
    targets: Any
    shares: Any
    weights: Any = None


class Own:
    """The tensors of one network and its own optimizer."""

    def __init__(self, job: Job) -> None:
        self.weights, self.gradients = {}, {}
        for name, parameter in job.parts.parameters:
            parameter.grad = torch.zeros_like(parameter)
            self.weights[name] = parameter.detach()[None]
            self.gradients[name] = parameter.grad[None]
        self.step: Callable[[], Any] = job.optimizer.step

    def hand_over(self) -> None:
        """Do nothing: these are the network's tensors."""


class Settings(NamedTuple):
    """The weights and the limits of the networks' penalties in an epoch."""

    factors: Any  # (k,)
    clips: Any  # (k,), or a number
    limit: PenaltyLimit
    # whether `limit` is the one of a single network, whose numbers need no wait for a device
    is_single: bool

    def share(self, losses: tuple[Any, Any], penalty: Any, measured: Measured | None) -> Any:
        """Return the shares of the penalties that the limits leave: (k,)."""
        limit, clips, (loss, of_constant) = self.limit, self.clips, losses
        if not self.is_single:
            return limit.share(loss, of_constant, penalty, clips, measured)
        if measured is not None:
            of_loss, of_penalty, weights = measured
            measured = Measured(of_loss.item(), of_penalty.item(), weights[0])
        share = limit.share(loss.item(), of_constant.item(), penalty.item(), clips, measured)
        return as_kind([share], penalty)


def settings_of(jobs: Sequence[Job], like: Any) -> Settings | None:
    """Read the penalties of networks of one kind, as arrays of the kind of another one."""
    penalties = [job.penalty for job in jobs if job.penalty is not None]
    if not penalties:
        return None
    factors = as_kind([penalty.weight for penalty in penalties], like)
    first, clips = penalties[0], [penalty.clip for penalty in penalties]
    on_host = not isinstance(like, Tensor) or like.device.type == "cpu"
    if first.clip is None or (len(clips) == 1 and on_host):
        return Settings(factors, first.clip, first.limit, is_single=True)
    limit = PenaltyLimit.stack([penalty.limit for penalty in penalties], like)
    return Settings(factors, as_kind(clips, like), limit, is_single=False)


def hand_back(settings: Settings | None, jobs: Iterable[Job]) -> None:
    """Give the limits of the networks' penalties what the steps have shown."""
    if settings is not None and not settings.is_single:
        settings.limit.unstack([job.penalty.limit for job in jobs if job.penalty is not None])


class Body(Protocol):
    """Networks with their weights."""

    weights: dict[str, Any]
    gradients: list[Any]

    def forward(self, x: Any) -> tuple[Any, Any, Any]:
        """Compute outputs, and return them with the features and the weight of the last layer."""

    def backward(self, z: Any, phi: Any = None, weight: Any = None, *others: Any) -> None:
        """Compute the gradients of the weights, from that in the output.

        `phi` and `weight` are added to the gradients in features and weight of the last layer.
        `others` are pairs of a tensor with a graph and the gradient in it.
        """


# from a batch and the networks' factors, (k,), to penalties with their graph, (k,)
EarlierTerms = Callable[[StepBatch, Any], Tensor]


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
        z, phi, weight = self._body.forward(batch.inputs)
        loss, of_z, p = self._loss.slopes(z, batch.targets, batch.shares)
        if settings is None:
            self._body.backward(of_z)
            return (loss,)
        factors = settings.factors / self._loss.divisor(z.shape[-1])
        term = graph = None
        penalty = 0 * loss
        if self._earlier is not None:
            graph = self._earlier(batch, factors)
            penalty = penalty + graph.detach()
        if self._at_last:
            scale = batch.shares * (factors / (2 * phi.shape[-1]))[:, None]
            term = self._loss.trace_term(p, phi, weight, scale[..., None])
            penalty = penalty + term.value

        def differentiate(of_loss: float, of_penalty: Any) -> None:
            others = [] if graph is None else [(graph, of_penalty)]
            if term is None:
                self._body.backward(of_loss * of_z, None, None, *others)
                return
            each = of_penalty[:, None, None]
            self._body.backward(
                of_loss * of_z + each * term.z,
                (each * term.of_phi) * phi,
                each * term.weight,
                *others,
            )

        losses = loss, self._loss.of_constant(z, batch.targets, batch.shares)
        share = _limited(settings, self._body, differentiate, losses, penalty)
        return loss, penalty, share


def _limited(
    settings: Settings,
    body: Body,
    differentiate: Callable[[float, Any], None],
    losses: tuple[Any, Any],
    penalty: Any,
) -> Any:
    """Write the gradients of the losses and of the shares of the penalties that the limit leaves.

    `differentiate` writes those of given multiples of losses and penalties. `losses` are those of
    the networks and of a constant. Shapes: each of `losses`, `penalty` (k,); returns shares (k,).
    """
    ones = namespace(penalty).ones_like(penalty)
    if settings.clips is None:
        differentiate(1.0, ones)
        return ones
    gradients, of_penalty, measured = body.gradients, None, None
    if settings.limit.needs_measurement:
        differentiate(0.0, ones)
        of_penalty = [1 * gradient for gradient in gradients]
        differentiate(1.0, 0 * ones)
        weights = namespace(penalty).concatenate(_rows(body.weights.values()), axis=1)
        measured = Measured(_norm(gradients), _norm(of_penalty), weights)
    share = settings.share(losses, penalty, measured)
    if of_penalty is None:
        differentiate(1.0, share)
        return share
    for gradient, other in zip(gradients, of_penalty, strict=True):
        gradient[...] += share.reshape(-1, *[1] * (other.ndim - 1)) * other
    return share


def _rows(arrays: Iterable[Any]) -> list[Any]:
    """Flatten each network's arrays: (k, ...) to (k, p)."""
    return [array.reshape(len(array), -1) for array in arrays]


def _norm(gradients: Iterable[Any]) -> Any:
    """Compute the norms of each network's gradients: (k,)."""
    rows = _rows(gradients)
    return namespace(rows[0]).sqrt(sum((row * row).sum(-1) for row in rows))

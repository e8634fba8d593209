"""A training step of several networks: losses, penalties with their limits, gradients."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from relflat_sk._losses import ArrayLoss, namespace
from relflat_sk._penalty import PenaltyLimit


class Batch(NamedTuple):
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

    def __init__(self, net: Any, unused: Collection[str] = ()) -> None:
        self.weights, self.gradients = {}, {}
        for name, parameter in net.module_.named_parameters():
            gradient = torch.zeros_like(parameter)
            parameter.grad = None if name in unused else gradient
            self.weights[name], self.gradients[name] = parameter.detach()[None], gradient[None]
        self.buffers = {name: buffer[None] for name, buffer in net.module_.named_buffers()}
        self.step: Callable[[], Any] = net.optimizer_.step

    def hand_over(self) -> None:
        """Do nothing: these are the network's tensors."""


class Settings(NamedTuple):
    """The weights and the limits of the networks' penalties in an epoch. Shapes: (k,)."""

    factors: Any
    limit: PenaltyLimit | None

    def finish(self, nets: Iterable[Any]) -> None:
        """Give the nets what their limits have seen in this epoch."""
        if self.limit is not None:
            self.limit.unstack([net._penalty_limit() for net in nets])


def settings_of(nets: Sequence[Any], like: Any) -> Settings | None:
    """Read the penalties of nets of one kind, as arrays of the kind of another one."""
    if not nets[0].flatness_weight:
        return None
    weights = [net._penalty_weight() for net in nets]
    factors: Any = torch.tensor(weights, dtype=torch.float64)
    factors = factors.to(like) if isinstance(like, Tensor) else factors.numpy().astype(like.dtype)
    if nets[0].flatness_clip is None:
        return Settings(factors, None)
    return Settings(factors, PenaltyLimit.stack([net._penalty_limit() for net in nets], like))


class Body(Protocol):
    """Networks with their weights."""

    gradients: list[Any]

    def forward(self, x: Any) -> tuple[Any, Any, Any]:
        """Compute outputs, and return them with the features and the weight of the last layer."""

    def backward(self, z: Any, phi: Any = None, weight: Any = None) -> None:
        """Compute the gradients of the weights."""


class Step:
    """Training steps with the penalty at the last layer, or without."""

    def __init__(self, body: Body, loss: ArrayLoss) -> None:
        self._body, self._loss = body, loss

    def __call__(self, batch: Batch, settings: Settings | None) -> tuple[Any, ...]:
        """Write the gradients of a batch; return losses, penalties and shares of them."""
        z, phi, weight = self._body.forward(batch.inputs)
        loss, of_z, p = self._loss.slopes(z, batch.targets, batch.shares)
        if settings is None:
            self._body.backward(of_z)
            return (loss,)
        each = settings.factors / (2 * phi.shape[-1] * self._loss.divisor(z.shape[-1]))
        term = self._loss.trace_term(p, phi, weight, (batch.shares * each[:, None])[..., None])

        def differentiate(of_loss: float, of_penalty: Any) -> None:
            of_penalty = of_penalty[:, None, None]
            of_phi = (of_penalty * term.of_phi) * phi
            self._body.backward(
                of_loss * of_z + of_penalty * term.z, of_phi, of_penalty * term.weight
            )

        gain = self._loss.gain(loss, z, batch.targets, batch.shares)
        share = limited(settings.limit, self._body.gradients, differentiate, gain, term.value)
        return loss, term.value, share


def limited(
    limit: PenaltyLimit | None,
    gradients: Sequence[Any],
    differentiate: Callable[[float, Any], None],
    gain: Any,
    penalty: Any,
) -> Any:
    """Write the gradients of the losses and of the shares of the penalties that the limit leaves.

    `differentiate` writes those of given multiples of losses and penalties. Shapes: `gain`,
    `penalty` (k,); returns the shares (k,).
    """
    ones = namespace(penalty).ones_like(penalty)
    if limit is None:
        differentiate(1.0, ones)
        return ones
    if not limit.needs_norms:
        share = limit.share(gain, penalty)
        differentiate(1.0, share)
        return share
    differentiate(0.0, ones)
    of_penalty = [1 * gradient for gradient in gradients]
    differentiate(1.0, 0 * ones)
    share = limit.share(gain, penalty, (_norm(gradients), _norm(of_penalty)))
    for gradient, other in zip(gradients, of_penalty, strict=True):
        gradient[...] += share.reshape(-1, *[1] * (other.ndim - 1)) * other
    return share


def _norm(gradients: Sequence[Any]) -> Any:
    """Compute the norms of each network's gradients: (k,)."""
    rows = [gradient.reshape(len(gradient), -1) for gradient in gradients]
    return namespace(rows[0]).sqrt(sum((row * row).sum(-1) for row in rows))

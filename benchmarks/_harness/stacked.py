"""Train many small perceptrons together by SGD with momentum on stacked weights.

A study of choices needs tens of thousands of networks. All candidates of one architecture and batch
size take their steps in one batched product; rate, weight decay, dropout, epochs and seed are each
one's own.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from relflat_sk import MLP

MOMENTUM = 0.9
Weights = list[Tensor]  # weight and bias of each layer in turn, (inputs, outputs) and (1, outputs)


@dataclass(frozen=True)
class Candidate:
    """The settings of one training."""

    hidden: tuple[int, ...]  # widths
    batch_size: int
    lr: float
    seed: int  # of initial weights and shuffling
    weight_decay: float = 0.0
    dropout: float = 0.0  # behind each hidden layer
    epochs: int = 30
    goal: float = 0.0  # training loss at which training ends before its last epoch


def train(candidates: Sequence[Candidate], data: Sequence[tuple[Tensor, Tensor]]) -> list[Weights]:
    """Train each candidate on its data, (X, y), of which classes are integers, on its device.

    The weights come back on the CPU. Initial weights and orders are the same on all devices.
    """
    groups = defaultdict(list)
    for i, (one, (X, _)) in enumerate(zip(candidates, data, strict=True)):
        groups[one.hidden, one.batch_size, len(X)].append(i)
    found: dict[int, Weights] = {}
    for places in groups.values():
        stack = _Stack([candidates[i] for i in places], [data[i] for i in places])
        found |= {places[k]: weights for k, weights in stack.run().items()}
    return [found[i] for i in range(len(candidates))]


class _Stack:
    """Networks of one architecture that take their steps together; arrays are (k, ...)."""

    def __init__(
        self, candidates: Sequence[Candidate], data: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        self.candidates = list(candidates)
        self.X, self.y = (torch.stack(parts) for parts in zip(*data, strict=True))
        self.device = self.X.device
        self.generators = [torch.Generator().manual_seed(one.seed) for one in candidates]
        self.dropout = torch.Generator(self.device).manual_seed(candidates[0].seed)
        sizes = [self.X.shape[-1], *candidates[0].hidden, n_outputs(self.y)]
        drawn = [_draw(sizes, generator) for generator in self.generators]
        self.weights = [torch.stack(parts).to(self.device) for parts in zip(*drawn, strict=True)]
        self.momenta = [torch.zeros_like(weight) for weight in self.weights]
        self.places = list(range(len(candidates)))
        self._set_rates()

    def _set_rates(self) -> None:
        self.rates, self.decays, self.keeps = (
            self._of_each(name)[:, None, None] for name in ("lr", "weight_decay", "dropout")
        )
        self.keeps = 1 - self.keeps
        self.drops = bool((self.keeps < 1).any())

    def _of_each(self, name: str) -> Tensor:
        """Return a setting of each network, (k,)."""
        return torch.tensor([getattr(one, name) for one in self.candidates], device=self.device)

    def run(self) -> dict[int, Weights]:
        """Train all, and return the weights by the places of the candidates."""
        found: dict[int, Weights] = {}
        for epoch in range(1, max(one.epochs for one in self.candidates) + 1):
            losses = self._train_epoch()
            # near a goal: the loss of the weights as they are
            if bool((losses <= 2 * self._of_each("goal")).any()):
                with torch.no_grad():
                    losses = mean_losses(outputs(self.weights, self.X), self.y)
            ended = [
                one.epochs <= epoch or not loss > one.goal or loss == torch.inf
                for one, loss in zip(self.candidates, losses.tolist(), strict=True)
            ]  # nan is not above any goal: a network that diverged ends
            rows = [k for k, is_over in enumerate(ended) if is_over]
            weights = [weight[rows].cpu() for weight in self.weights] if rows else []
            for i, k in enumerate(rows):
                found[self.places[k]] = [weight[i].clone() for weight in weights]
            self._keep([k for k, is_over in enumerate(ended) if not is_over])
            if not self.places:
                break
        return found

    def _keep(self, rows: list[int]) -> None:
        if len(rows) == len(self.places):
            return
        for name in ("weights", "momenta"):
            setattr(self, name, [array[rows] for array in getattr(self, name)])
        for name in ("candidates", "generators", "places"):
            setattr(self, name, [getattr(self, name)[k] for k in rows])
        self.X, self.y = self.X[rows], self.y[rows]
        if rows:
            self._set_rates()

    def _train_epoch(self) -> Tensor:
        """Take the steps of an epoch; return each network's mean loss in it, (k,)."""
        k, n = self.X.shape[:2]
        order = torch.stack([torch.randperm(n, generator=one) for one in self.generators])
        total = torch.zeros(k, device=self.device)
        net = torch.arange(k, device=self.device)[:, None]
        for rows in order.to(self.device).split(self.candidates[0].batch_size, dim=1):
            weights = [weight.requires_grad_() for weight in self.weights]
            losses = mean_losses(self._forward(weights, self.X[net, rows]), self.y[net, rows])
            gradients = torch.autograd.grad(losses.sum(), weights)
            total += losses.detach() * rows.shape[1] / n
            self.weights = [weight.detach() for weight in weights]
            for weight, momentum, gradient in zip(
                self.weights, self.momenta, gradients, strict=True
            ):
                momentum.mul_(MOMENTUM).add_(gradient).addcmul_(self.decays, weight)
                weight.addcmul_(self.rates, momentum, value=-1)
        return total

    def _forward(self, weights: Weights, x: Tensor) -> Tensor:
        if not self.drops:
            return outputs(weights, x)
        *hidden, last = pairs(weights)
        for weight, bias in hidden:
            x = torch.baddbmm(bias, x, weight).relu()
            draws = torch.rand(x.shape, generator=self.dropout, device=self.device)
            x = x * (draws < self.keeps) / self.keeps
        return torch.baddbmm(last[1], x, last[0])


def n_outputs(y: Tensor) -> int:
    """Return the number of outputs: that of the classes, or one for values."""
    return 1 if y.is_floating_point() else int(y.max()) + 1


def _draw(sizes: Sequence[int], generator: torch.Generator) -> Weights:
    """Draw initial weights as `torch.nn.Linear` does."""
    found = []
    for n_in, n_out in pairwise(sizes):
        for rows in (n_in, 1):
            draw = torch.rand(rows, n_out, generator=generator)
            found.append((2 * draw - 1) / n_in**0.5)
    return found


def pairs(weights: Weights) -> list[tuple[Tensor, Tensor]]:
    """Pair each layer's weight with its bias."""
    return list(zip(weights[::2], weights[1::2], strict=True))


def outputs(weights: Weights, x: Tensor) -> Tensor:
    """Return the outputs of stacked networks, (k, n, outputs), for (k, n, inputs)."""
    *hidden, last = pairs(weights)
    for weight, bias in hidden:
        x = torch.baddbmm(bias, x, weight).relu()
    return torch.baddbmm(last[1], x, last[0])


def mean_losses(z: Tensor, y: Tensor) -> Tensor:
    """Return the mean loss of each network: cross-entropy of classes, or squared error."""
    if y.is_floating_point():
        return (z[..., 0] - y).square().mean(dim=1)
    return cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(dim=1)


def criterion_of(y: Tensor) -> nn.Module:
    """Return the criterion that `mean_losses` means, for `flatness_report`."""
    return nn.MSELoss() if y.is_floating_point() else nn.CrossEntropyLoss()


def to_module(weights: Weights) -> nn.Module:
    """Make a module of a network's weights."""
    sizes = [weights[0].shape[0], *(bias.shape[1] for bias in weights[1::2])]
    module = MLP(sizes[0], sizes[-1], hidden_layer_sizes=sizes[1:-1])
    state = [part.squeeze(0) if part.shape[0] == 1 and i % 2 else part.T
             for i, part in enumerate(weights)]  # fmt: skip
    for parameter, value in zip(module.parameters(), state, strict=True):
        parameter.data.copy_(value)
    return module.eval()

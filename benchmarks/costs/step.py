"""Time of a penalised step of our net by autograd, next to one that is written by hand.

The step by hand is plain torch, with the penalty at the last layer and its limit: digits in batches
of 32, a network 64-100-10, Adam, one thread. A third step has the same lines inside skorch's. They
take turns, and medians are compared.

    python -m benchmarks.costs.step            # 10 seconds
    python -m benchmarks.costs.step --quick    # a smoke run
"""

import argparse
import time
from functools import partial
from statistics import median
from typing import Any

import torch
from sklearn.datasets import load_digits
from skorch import NeuralNet
from torch import Tensor, nn

from relflat_sk import RelativeFlatnessRegularizedClassifier

WEIGHT, CLIP = 0.1, 0.5


class ByHand:
    """A training of a few lines."""

    def __init__(self) -> None:
        self.body = nn.Sequential(nn.Linear(64, 100), nn.ReLU())
        self.head = nn.Linear(100, 10)
        self.parameters = [*self.body.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=0.003, fused=True)
        self.steps, self.n = 0, 0
        self.typical, self.squares, self.n_squares, self.mean = 0.0, 0.0, 0.0, 0.0

    def norm(self, value: Tensor) -> Tensor:
        """Compute the norm of a gradient."""
        found = torch.autograd.grad(value, self.parameters, retain_graph=True)
        return nn.utils.get_total_norm(found)

    def step(self, x: Tensor, y: Tensor) -> None:
        """Make a step."""
        features = self.body(x)
        total = self.objective(features, self.head(features), y)
        self.optimizer.zero_grad()
        total.backward()
        self.optimizer.step()

    def objective(self, features: Tensor, z: Tensor, y: Tensor) -> Tensor:
        """Compute the loss with the penalty."""
        weight = self.head.weight
        loss, p = nn.functional.cross_entropy(z, y), z.softmax(1)
        variances = p @ weight.square().sum(1) - (p @ weight).square().sum(1)
        scale = WEIGHT / (2 * weight.shape[1])
        penalty = scale * (features.square().sum(1) * variances).mean()
        with torch.no_grad():
            constant = nn.functional.cross_entropy(z.mean(0).expand_as(z), y)
            by_value = (1 - loss / constant).abs().clamp(max=1) * (constant - loss) / 5
        if self.steps < 8 or self.steps % 8 == 0:
            of_loss, ratio = self.norm(loss), self.norm(penalty) / penalty.detach()
            self.squares, self.n_squares = 0.9 * self.squares + ratio**2, 0.9 * self.n_squares + 1
            self.n += 1
            self.typical = self.typical + (of_loss - self.typical) * 0.001 / (1 - 0.999**self.n)
        self.steps += 1
        ratio = (self.squares / self.n_squares) ** 0.5
        largest = CLIP * torch.minimum(by_value, 2 * self.typical / ratio)
        size = penalty.detach()
        self.mean = self.mean + 0.03 * (size - self.mean)
        share = (largest / torch.maximum(size, self.mean)).clamp(0, 1)
        return loss + share * penalty


class BySkorch(NeuralNet):
    """The same lines in skorch's own step."""

    def initialize_optimizer(self, triggered_directly: bool = True) -> "BySkorch":
        """Give the objective the optimizer's parameters."""
        super().initialize_optimizer(triggered_directly)
        self.by_hand_ = ByHand()
        self.by_hand_.head = self.module_[2]
        self.by_hand_.parameters = list(self.module_.parameters())
        return self

    def infer(self, x: Tensor, **fit_params: Any) -> Any:
        """Return the features of the last layer as well."""
        features = self.module_[:2](x)
        return self.module_[2](features), features

    def get_loss(self, y_pred: Any, y_true: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the loss with the penalty."""
        return self.by_hand_.objective(y_pred[1], y_pred[0], y_true)


def main() -> None:
    """Print the steps' times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="smoke run")
    rounds = 3 if parser.parse_args().quick else 60
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    batch = torch.tensor(images[:32] / 16).float(), torch.tensor(labels[:32])
    net = RelativeFlatnessRegularizedClassifier(
        module__n_features=64, module__n_outputs=10, flatness_weight=WEIGHT, verbose=0
    ).initialize()
    by_skorch = BySkorch(
        nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)),
        nn.CrossEntropyLoss,
        optimizer=partial(torch.optim.Adam, lr=0.003, fused=True),
        verbose=0,
    ).initialize()
    by_hand = ByHand()

    def run(net: NeuralNet) -> None:
        net.run_single_epoch([batch] * 32, training=True, prefix="train", step_fn=net.train_step)

    def run_by_hand() -> None:
        for _ in range(32):
            by_hand.step(*batch)

    runs = {
        "ours": partial(run, net),
        "the lines by hand in skorch's step": partial(run, by_skorch),
        "by hand": run_by_hand,
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for one in (net, by_skorch):
        one.history.new_epoch()
    for _ in range(rounds):
        for name, call in runs.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) / 32)
    by_hand_s = median(times["by hand"])
    for name, taken in times.items():
        print(f"{name}: {1000 * median(taken):.2f} ms, ratio {median(taken) / by_hand_s:.2f}")


if __name__ == "__main__":
    main()

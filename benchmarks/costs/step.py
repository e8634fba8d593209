"""Time of a penalised step of our net by autograd, next to one that is written by hand.

The step by hand is plain torch, with the penalty at the last layer and its limit: digits in batches
of 32, a network 64-100-10, Adam, one thread. The two take turns, and medians are compared.

    python -m benchmarks.costs.step            # 10 seconds
    python -m benchmarks.costs.step --quick    # a smoke run
"""

import argparse
import time
from statistics import median

import torch
from sklearn.datasets import load_digits
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
        features, weight = self.body(x), self.head.weight
        z = self.head(features)
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
        self.optimizer.zero_grad()
        (loss + share * penalty).backward()
        self.optimizer.step()


def main() -> None:
    """Print the ratio of the two steps."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="smoke run")
    rounds = 3 if parser.parse_args().quick else 60
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    batch = torch.tensor(images[:32] / 16).float(), torch.tensor(labels[:32])
    net = RelativeFlatnessRegularizedClassifier(
        module__n_features=64, module__n_outputs=10, flatness_weight=WEIGHT, verbose=0
    ).initialize()
    net.history.new_epoch()
    by_hand, times = ByHand(), ([], [])

    def ours() -> None:
        net.run_single_epoch([batch] * 32, training=True, prefix="train", step_fn=net.train_step)

    def theirs() -> None:
        for _ in range(32):
            by_hand.step(*batch)

    for _ in range(rounds):
        for run, taken in zip((ours, theirs), times, strict=True):
            start = time.perf_counter()
            run()
            taken.append((time.perf_counter() - start) / 32)
    ours_ms, hand_ms = (1000 * median(taken) for taken in times)
    print(f"ours {ours_ms:.2f} ms, by hand {hand_ms:.2f} ms, ratio {ours_ms / hand_ms:.2f}")


if __name__ == "__main__":
    main()

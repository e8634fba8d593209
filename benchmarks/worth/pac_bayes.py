"""Check the PAC-Bayes guarantee on small networks whose true error is known.

Each seed draws a binary task, a sample of 500, and initial weights, towards which a network 8-16-2
is trained with weight decay. `pac_bayes_bound` bounds the error of the network with noise on its
weights, and 20,000 fresh samples show that error. The bound may fail for 5 of 100 seeds. It is
worth something below 0.5, the error of a coin: here for at least 95 of 100 seeds.
"""

import copy
from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks._harness.networks import epochs
from benchmarks._harness.options import read_options
from benchmarks._harness.timing import Budget, environment, verdict
from relflat_sk import MLP
from relflat_sk.theory import PacBayesBound, pac_bayes_bound

N_FEATURES, N_HIDDEN, N_FRESH = 8, 16, 20_000
CRITERION = nn.CrossEntropyLoss()
EPOCHS, BATCH_SIZE, LEARNING_RATE = 60, 32, 0.01
DECAY = 0.1
SPREAD = 2.0  # of the Gaussians' centres, in units of the Gaussians' own deviation
CONFIDENCE = 0.95


def draw(
    centres: np.ndarray,  # (2 classes, 2 Gaussians, features)
    n: int,
    rng: np.random.Generator,
) -> tuple[Tensor, Tensor]:
    """Draw n independent samples of a task with their labels."""
    y, which = rng.integers(2, size=(2, n))
    X = centres[y, which] + rng.normal(size=(n, N_FEATURES))
    return torch.tensor(X, dtype=torch.float32), torch.tensor(y)


def train(net: nn.Module, X: Tensor, y: Tensor) -> nn.Module:
    """Return a copy of the network, trained with weight decay towards the network's weights."""
    trained = copy.deepcopy(net)
    before = [parameter.detach() for parameter in net.parameters()]
    optimizer = torch.optim.Adam(trained.parameters(), lr=LEARNING_RATE)

    def loss(rows: Tensor) -> Tensor:
        pairs = zip(trained.parameters(), before, strict=True)
        apart = sum((now - then).square().sum() for now, then in pairs)
        return CRITERION(trained(X[rows]), y[rows]) + DECAY / 2 * apart

    training = epochs(loss, optimizer, len(X), BATCH_SIZE)
    for _ in range(EPOCHS):
        next(training)
    return trained.eval()


def true_errors(net: nn.Module, sigma: float, X: Tensor, y: Tensor) -> Iterator[float]:
    """Compute the errors on fresh samples for 100 draws of noise."""
    for _ in range(100):
        noisy = {
            name: weight + sigma * torch.randn_like(weight)
            for name, weight in net.named_parameters()
        }
        with torch.no_grad():
            wrong = functional_call(net, noisy, (X,)).argmax(dim=1) != y
        yield wrong.float().mean().item()


def judge(seed: int, samples: int) -> dict[str, float]:
    """Draw a task, train a network, and compare its bound with its error."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    centres = SPREAD * rng.normal(size=(2, 2, N_FEATURES))
    X, y = draw(centres, samples, rng)
    X_new, y_new = draw(centres, N_FRESH, rng)
    initial = MLP(N_FEATURES, 2, (N_HIDDEN,))
    net = train(initial, X, y)
    found: PacBayesBound = pac_bayes_bound(
        net, X, y, initial=initial, delta=1 - CONFIDENCE, criterion=CRITERION, random_state=seed
    )
    return {
        "error without noise, sample": found.empirical_error,
        "error without noise, fresh": (net(X_new).argmax(dim=1) != y_new).float().mean().item(),
        "sigma": found.sigma,
        "KL (nats)": found.kl,
        "error with noise, sample": found.noisy_error,
        "its upper limit": found.noisy_error_limit,
        "error with noise, fresh": float(np.mean([*true_errors(net, found.sigma, X_new, y_new)])),
        "bound": found.bound,
        "bound as printed in the paper": found.mcallester,
    }


def main() -> int:
    arguments = read_options(__doc__, seeds=(100, 3), samples=500)
    seeds = arguments.seeds
    print(f"MLPs {N_FEATURES}-{N_HIDDEN}-2 on {arguments.samples} samples, {seeds} seeds")
    print(environment())
    rows = pd.DataFrame([judge(seed, arguments.samples) for seed in range(seeds)])
    holds = rows["bound"] >= rows["error with noise, fresh"]
    useful = rows["bound"] < 0.5
    table = rows.agg(["mean", "min", "max"]).T
    print(f"\n{table.to_string(float_format='{:.3g}'.format)}")
    budgets = [
        Budget(
            "share of seeds whose bound is above the true error", holds.mean(), CONFIDENCE, True
        ),
        Budget("share of seeds whose bound is below 0.5", useful.mean(), CONFIDENCE, True),
    ]
    return verdict(budgets, judged=not arguments.quick)


if __name__ == "__main__":
    raise SystemExit(main())

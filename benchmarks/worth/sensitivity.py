"""Compare predicted with measured rises of the loss under rounding of a layer's weight.

Three networks are trained on scikit-learn's digits: a perceptron with three hidden layers, a
convolutional network, and a small transformer over the rows of the image. For each layer and
number of bits, `layer_sensitivity` predicts the rise of the loss from 300 samples of the training
data. The rise is measured on these samples, and on the other training samples.

tau        Kendall's coefficient of predicted and measured rises over the layers, same samples
trace      the same for ``Tr(H) mean(D^2) / 2``
error      median of abs(predicted - measured) / abs(measured), same samples
within     share of the layers whose rise on the other samples is within two standard errors of
           the prediction, where the error is that of the difference; 0.95 is expected
passes     seconds of the prediction over those of measuring all layers

    python -m benchmarks.worth.sensitivity            # a few minutes
    python -m benchmarks.worth.sensitivity --quick    # a smoke run
"""

import argparse
import sys
import time

import numpy as np
import pandas as pd
import torch
from scipy.stats import kendalltau
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks._harness.timing import environment, table
from relflat_sk import layer_sensitivity

BITS = (8, 6, 4, 3)
N_SAMPLES = 300
CRITERION = nn.CrossEntropyLoss()


class Transformer(nn.Module):
    """Two blocks over the eight rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.position = nn.Parameter(0.1 * torch.randn(8, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images of shape (n, 64)."""
        h = self.blocks(self.embed(x.unflatten(1, (8, 8))) + self.position)
        logits: Tensor = self.head(h.mean(1))
        return logits


def make_networks() -> dict[str, nn.Module]:
    """Make untrained networks."""
    torch.manual_seed(0)
    perceptron = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip
    convolutional = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip
    networks = {"perceptron": perceptron, "convolutional": convolutional}
    return {**networks, "transformer": Transformer()}


def train(net: nn.Module, X: Tensor, y: Tensor, epochs: int) -> float:
    """Train a network, and return its mean loss."""
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(X)).split(64):
            optimizer.zero_grad()
            CRITERION(net(X[rows]), y[rows]).backward()
            optimizer.step()
    with torch.no_grad():
        return float(CRITERION(net.eval()(X), y))


def judge(net: nn.Module, X: Tensor, y: Tensor) -> tuple[pd.DataFrame, float]:
    """Predict from some samples, measure on these and on the others."""
    options = {"bits": BITS, "criterion": CRITERION, "random_state": 0}
    seconds = []
    tables = []
    for some, measured in ((slice(N_SAMPLES), False), (slice(N_SAMPLES), True)):
        start = time.perf_counter()
        tables.append(layer_sensitivity(net, X[some], y[some], measured=measured, **options))
        seconds.append(time.perf_counter() - start)
    others = layer_sensitivity(net, X[N_SAMPLES:], y[N_SAMPLES:], measured=True, **options)
    found = tables[1]
    found[["elsewhere", "elsewhere_stderr"]] = others[["measured", "measured_stderr"]]
    return found, seconds[0] / (seconds[1] - seconds[0])


def main() -> int:
    """Train, predict, measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description="Judge predicted rises under rounding.")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    quick = parser.parse_args().quick
    print(environment())
    X, y = (torch.as_tensor(one) for one in load_digits(return_X_y=True))
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))[:1400]
    X, y = X[order].float() / 16, y[order]
    rows = [["network", "loss", "layers", "bits", "largest rise", "tau", "trace", "error", "within",
             "passes"]]  # fmt: skip
    for name, net in make_networks().items():
        loss = train(net, X, y, 1 if quick else 15)
        found, cost = judge(net.double(), X.double(), y)
        for bits, part in found.groupby("bits", sort=False):
            distance = (part["predicted"] - part["elsewhere"]).abs()
            error = np.hypot(part["stderr"], part["elsewhere_stderr"])
            relative = (part["predicted"] - part["measured"]).abs() / part["measured"].abs()
            rows.append([
                name, f"{loss:.3f}", str(len(part)), str(bits), f"{part['measured'].max():.1e}",
                *(f"{kendalltau(part[way], part['measured']).statistic:.2f}"
                  for way in ("predicted", "by_trace")),
                f"{relative.median():.3f}", f"{(distance < 2 * error).mean():.2f}", f"{cost:.2f}",
            ])  # fmt: skip
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare predicted with measured rises of the loss under rounding of a layer's weight.

Ten times, scikit-learn's digits are cut at random into four parts of 350 samples. From each part,
`layer_sensitivity` predicts the rise of the loss of three networks for each layer and number of
bits. The rise is measured on the same samples, and on the other three parts. All columns are over
the 40 parts:

tau        mean of Kendall's coefficient of predicted and measured rises over the layers
trace      the same for ``Tr(H) mean(D^2) / 2``
error      median of abs(predicted - measured) / abs(measured)
within     share of the rises on the other parts that are within two standard errors of the
           prediction, where the error is that of the difference; 0.95 is expected
measured   the same for the rise that was measured on the part, in place of the prediction
passes     seconds of the prediction over those of measuring all layers
"""

import time

import numpy as np
import pandas as pd
import torch
from scipy.stats import kendalltau
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks._harness.networks import epochs
from benchmarks._harness.options import read_options
from benchmarks._harness.timing import environment
from relflat_sk import layer_sensitivity

BITS = (8, 6, 4, 3)
N_PARTS, N_SAMPLES = 4, 350
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


def train(net: nn.Module, X: Tensor, y: Tensor, n_epochs: int) -> float:
    """Train a network, and return its mean loss."""
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    training = epochs(lambda rows: CRITERION(net(X[rows]), y[rows]), optimizer, len(X), 64)
    for _ in range(n_epochs):
        next(training)
    with torch.no_grad():
        return float(CRITERION(net.eval()(X), y))


def judge(net: nn.Module, X: Tensor, y: Tensor, seed: int) -> tuple[pd.DataFrame, float]:
    """Predict and measure on parts of the data; add what the other parts show of each."""
    options = {"bits": BITS, "criterion": CRITERION, "random_state": 0}
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
    tables, seconds = [], []
    for some in order.split(N_SAMPLES):
        start = time.process_time()
        if not tables:  # how long it takes without measuring
            layer_sensitivity(net, X[some], y[some], **options)
        between = time.process_time()
        tables.append(layer_sensitivity(net, X[some], y[some], measured=True, **options))
        seconds += [between - start, time.process_time() - between]
    rises, errors = (
        np.stack([one[name] for one in tables]) for name in ("measured", "measured_stderr")
    )
    n_others = len(tables) - 1
    for i, found in enumerate(tables):
        found["part"] = f"{seed}.{i}"
        found["elsewhere"] = (rises.sum(0) - rises[i]) / n_others
        found["elsewhere_stderr"] = np.sqrt((errors**2).sum(0) - errors[i] ** 2) / n_others
    return pd.concat(tables), seconds[0] / (seconds[1] - seconds[0])


def summarize(found: pd.DataFrame) -> dict[str, float]:
    """Return the columns of one network and number of bits."""
    taus = [
        [kendalltau(part[way], part["measured"]).statistic for way in ("predicted", "by_trace")]
        for _, part in found.groupby("part")
    ]
    relative = (found["predicted"] - found["measured"]).abs() / found["measured"].abs()
    shares = [
        (found[value] - found["elsewhere"]).abs()
        < 2 * np.hypot(found[error], found["elsewhere_stderr"])
        for value, error in (("predicted", "stderr"), ("measured", "measured_stderr"))
    ]
    tau, trace = np.mean(taus, axis=0)
    return {
        "layers": found["layer"].nunique(),
        "largest rise": found.groupby("layer")["measured"].mean().max(),
        "tau": tau,
        "trace": trace,
        "error": relative.median(),
        "within": shares[0].mean(),
        "measured": shares[1].mean(),
    }


def main() -> None:
    quick = read_options(__doc__).quick
    print(environment())
    X, y = (torch.as_tensor(one) for one in load_digits(return_X_y=True))
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    order = order[: N_PARTS * N_SAMPLES]
    X, y = X[order].float() / 16, y[order]
    rows = []
    for name, net in make_networks().items():
        loss = train(net, X, y, 1 if quick else 15)
        net.double()
        tables, costs = zip(
            *(judge(net, X.double(), y, seed) for seed in range(1 if quick else 10)), strict=True
        )
        for bits, found in pd.concat(tables).groupby("bits", sort=False):
            cells = summarize(found) | {"passes": np.median(costs)}
            rows.append({"network": name, "loss": loss, "bits": bits, **cells})
    print(pd.DataFrame(rows).to_string(index=False, float_format="{:.2g}".format))


if __name__ == "__main__":
    main()

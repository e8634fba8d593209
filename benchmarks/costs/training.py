"""Time of a training step with the penalty at the last layer, the first layer and all layers.

Each time is divided by two others: by that of the same net with a penalty weight of zero, to
which the budgets refer, and by that of skorch's own classifier, which has no penalty and no
sample weights and checks less. "No limit" is ``flatness_clip=None``. With a CUDA device,
ResNet-18 is timed there as well. A step is a share of an epoch of ten, trained as in `fit`, and
"without the loader" of one whose batches are cut beforehand.

    python -m benchmarks.costs.training            # 4 minutes
    python -m benchmarks.costs.training --quick    # a smoke run without verdict
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from skorch import NeuralNet, NeuralNetClassifier
from torch import Tensor, nn

from benchmarks._harness.data import add_data_argument, load_images
from benchmarks._harness.networks import LeNet5, ResNet18
from benchmarks._harness.timing import Budget, environment, interleave, ratio, table, verdict
from relflat_sk import MLP, RelativeFlatnessRegularizedClassifier, SharpnessAwareMixin

BATCH_SIZE = 128
# steps of an epoch, which one net makes in a row
TURN = 10
OURS = RelativeFlatnessRegularizedClassifier


class DenseHessianNet(NeuralNetClassifier):
    """A net with the penalty at the last layer, computed from the layer's dense Hessian.

    Published code computes the penalty in this way, but without the gradient through the
    Hessian, which is included here.
    """

    def get_loss(
        self, y_pred: Tensor, y_true: Tensor, X: Any = None, training: bool = False
    ) -> Any:
        """Return the loss, with ``0.1 kappa / (2 m)`` added in training."""
        loss = super().get_loss(y_pred, y_true, X=X, training=training)
        if not training:
            return loss
        head = self.module_.head
        features = self.module_.features(X)
        m = head.in_features

        def risk(weight: Tensor) -> Tensor:
            return nn.functional.cross_entropy(features @ weight.T + head.bias, y_true)

        blocks = torch.func.hessian(risk)(head.weight)
        traces = blocks.diagonal(dim1=1, dim2=3).sum(dim=-1)
        return loss + 0.1 * (traces * (head.weight @ head.weight.T)).sum() / (2 * m)


class SharpnessAwareNet(SharpnessAwareMixin, NeuralNetClassifier):
    """skorch's own classifier, trained by SAM."""


def make_net(estimator: Callable[..., NeuralNet], module: Any, **arguments: object) -> NeuralNet:
    """Make a net with the settings that all methods share."""
    torch.manual_seed(0)
    return estimator(
        module,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        optimizer__momentum=0.9,
        lr=0.01,
        batch_size=BATCH_SIZE,
        train_split=None,
        max_epochs=1,  # of the single batch that initialises the net
        verbose=0,
        **arguments,
    )


# method -> function that makes its net from a module
METHODS: dict[str, Callable[..., NeuralNet]] = {
    "plain": partial(make_net, NeuralNetClassifier),
    "no penalty": partial(make_net, OURS, flatness_weight=0.0),
    "last layer": partial(make_net, OURS, flatness_layer=-1),
    "first layer": partial(make_net, OURS, flatness_layer=0),
    "all layers": partial(make_net, OURS, flatness_layer="all"),
    "last layer, no limit": partial(make_net, OURS, flatness_layer=-1, flatness_clip=None),
    "first layer, no limit": partial(make_net, OURS, flatness_layer=0, flatness_clip=None),
    "all layers, no limit": partial(make_net, OURS, flatness_layer="all", flatness_clip=None),
    "SAM": partial(make_net, SharpnessAwareNet),
    "dense Hessian, last layer": partial(make_net, DenseHessianNet),
}
IMAGE_MLP_NAME = "MLP 784-256-128-10"
IMAGE_MLP: dict[str, Any] = {
    "module__n_features": 784,
    "module__n_outputs": 10,
    "module__hidden_layer_sizes": (256, 128),
}


class Epochs:
    """Epochs of one net, trained as in `fit`.

    Parameters
    ----------
    net : NeuralNet
        The net; it is initialised on the first batch.
    X : Tensor of shape (n, ...)
        Inputs.
    y : Tensor of shape (n,)
        Classes.
    """

    def __init__(self, net: NeuralNet, X: Tensor, y: Tensor) -> None:
        self.net = net
        net.partial_fit(X[:BATCH_SIZE], y[:BATCH_SIZE])
        self.batches = self.make_batches(X, y)

    def make_batches(self, X: Tensor, y: Tensor) -> Any:
        """Return the net's own iterator."""
        return self.net.get_iterator(self.net.get_dataset(X, y), training=True)

    def __call__(self) -> None:
        """Train for an epoch, and wait for the GPU if there is one."""
        net = self.net
        net.history.new_epoch()
        net.run_single_epoch(self.batches, training=True, prefix="train", step_fn=net.train_step)
        if net.device.startswith("cuda"):
            torch.cuda.synchronize(net.device)


class Steps(Epochs):
    """Epochs of batches that are cut beforehand.

    A step contains nothing but forward pass, backward pass and update, and skorch's own loop makes
    it: the written-out gradients of chains need the net's iterator.
    """

    def make_batches(self, X: Tensor, y: Tensor) -> Any:
        """Cut the batches."""
        return list(zip(X.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True))


def main() -> int:
    """Measure, print, and return the exit code."""
    arguments = _parse()
    steps = arguments.steps or (1 if arguments.quick else 300)
    images, y = load_images(TURN * BATCH_SIZE, arguments.data)
    turn = min(TURN, max(1, steps // 8))  # eight rounds at least
    print(f"Training steps of {BATCH_SIZE} samples, {steps} of each net, {turn} in an epoch")
    print(environment())
    rows = [["training step", "median ms", "/ plain [quartiles]", "/ no penalty [quartiles]"]]
    found = {}
    for network in _networks(images, arguments.resnet):
        for loader in network.loaders:
            times = _time(network, y, steps, turn, loader=loader)
            title = network.name if loader else f"{network.name} without the loader"
            for name, seconds in times.items():
                median = f"{1000 * torch.tensor(seconds).median():.2f}"
                ratios = [ratio(seconds, times[other]) for other in ("plain", "no penalty")]
                rows.append([f"{title}, {name}", median, *map(str, ratios)])
                found[network.name, loader, name] = ratios[1].value
    print()
    print(table(rows))
    return verdict(_budgets(found, arguments.resnet), judged=not arguments.quick)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smoke run without verdict")
    parser.add_argument("--steps", type=int, help="steps of each net (default: 300)")
    parser.add_argument(
        "--resnet",
        metavar="DEVICE",
        default="cuda" if torch.cuda.is_available() else None,
        help="also time ResNet-18 on this device (default: CUDA if available)",
    )
    add_data_argument(parser)
    return parser.parse_args()


@dataclass(frozen=True)
class Timed:
    """A network to time, with its settings, its inputs, the methods, and with loader or without."""

    name: str
    module: Any
    settings: dict[str, Any]
    X: Tensor
    methods: list[str]
    loaders: tuple[bool, ...] = (True, False)


def _networks(images: Tensor, resnet: str | None) -> list[Timed]:
    """List the networks; `resnet` is the device of ResNet-18, or None."""
    pixels = images.flatten(1)[:, :784].contiguous()
    all_but_dense = list(METHODS)[:-1]
    networks = [
        Timed("LeNet-5", LeNet5, {}, images, list(METHODS)),
        Timed(IMAGE_MLP_NAME, MLP, IMAGE_MLP, pixels, all_but_dense),
    ]
    if resnet:
        few = [name for name in all_but_dense if "no limit" not in name]
        networks.append(Timed("ResNet-18", ResNet18, {"device": resnet}, images, few, (True,)))
    return networks


def _time(
    network: Timed, y: Tensor, steps: int, turn: int, *, loader: bool
) -> dict[str, list[float]]:
    """Time the steps of all methods: epochs of `turn` steps, in turn."""
    make = Epochs if loader else Steps
    n = turn * BATCH_SIZE
    ways = {}
    for name in network.methods:
        net = METHODS[name](network.module, **network.settings)
        ways[name] = make(net, network.X[:n], y[:n])
    times = interleave(ways, steps // turn, warmup=2)
    return {name: [each / turn for each in seconds] for name, seconds in times.items()}


def _budgets(found: dict[tuple[str, bool, str], float], resnet: str | None) -> list[Budget]:
    """Compare ratios to steps without penalty with their limits."""
    budgets = [
        Budget(f"{title}, {method} / no penalty", found[network, True, method], limit)
        for title, network, method, limit in [
            ("LeNet-5", "LeNet-5", "last layer, no limit", 1.05),
            ("LeNet-5", "LeNet-5", "last layer", 1.10),
            ("MLP", IMAGE_MLP_NAME, "first layer, no limit", 2.0),
            ("MLP", IMAGE_MLP_NAME, "first layer", 2.2),
        ]
    ]
    if resnet:
        limits = {"last layer": 1.05, "first layer": 2.5, "all layers": 3.0}
        budgets += [
            Budget(f"ResNet-18 on {resnet}, {method}", found["ResNet-18", True, method], limit)
            for method, limit in limits.items()
        ]
    return budgets


if __name__ == "__main__":
    sys.exit(main())

"""What the penalty costs in training: steps with and without it, at the last layer and earlier.

Next to the same net without penalty (its weight zero), which the budgets are for, and to skorch's
own classifier, which knows nothing of penalties and sample weights and checks less.
Run ``python -m benchmarks.training``; ``--quick`` for a smoke run. Where there is a CUDA device,
ResNet-18 is trained there, too.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
from skorch import NeuralNet, NeuralNetClassifier
from torch import Tensor, nn

from benchmarks.data import add_data_argument, load_images
from benchmarks.models import LeNet5, ResNet18
from benchmarks.timing import Budget, environment, interleave, ratio, table, verdict
from relflat_sk import MLP, RelativeFlatnessRegularizedClassifier, SharpnessAwareMixin

BATCH_SIZE = 128
# of one net before it is another's turn: in training, too, a step follows one of the same net
TURN = 10
OURS = RelativeFlatnessRegularizedClassifier


class DenseHessianNet(NeuralNetClassifier):
    """The penalty at the last layer as its definition says it, from the layer's dense Hessian.

    What published code does, with the gradient through the Hessian that published code lacks.
    """

    def get_loss(
        self, y_pred: Tensor, y_true: Tensor, X: Any = None, training: bool = False
    ) -> Any:
        """Add ``kappa / (2 m)`` in training."""
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
    """Plain, with SAM's steps."""


def make_net(estimator: Callable[..., NeuralNet], module: Any, **arguments: object) -> NeuralNet:
    """Make a net that differs from the others in nothing but its class."""
    torch.manual_seed(0)
    return estimator(
        module,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        optimizer__momentum=0.9,
        lr=0.01,
        batch_size=BATCH_SIZE,
        train_split=None,
        max_epochs=1,  # for the batch that sets a net up
        verbose=0,
        **arguments,
    )


# from a module to a net
METHODS: dict[str, Callable[..., NeuralNet]] = {
    "plain": partial(make_net, NeuralNetClassifier),
    "no penalty": partial(make_net, OURS, flatness_weight=0.0),
    "last layer": partial(make_net, OURS, flatness_layer=-1),
    "first layer": partial(make_net, OURS, flatness_layer=0),
    "all layers": partial(make_net, OURS, flatness_layer="all"),
    "SAM": partial(make_net, SharpnessAwareNet),
    "dense Hessian, last layer": partial(make_net, DenseHessianNet),
}
IMAGE_MLP: dict[str, Any] = {
    "module__n_features": 784,
    "module__n_outputs": 10,
    "module__hidden_layer_sizes": (256, 128),
}


class Steps:
    """Training steps of one net, batch after batch, as skorch's own loop makes them.

    With `loader`, batches come from the net's own iterator over the data, as in `fit`;
    without, they are cut out beforehand, which leaves the optimisation step alone. On a GPU
    a step ends when the GPU is done.
    """

    def __init__(self, net: NeuralNet, X: Tensor, y: Tensor, *, loader: bool) -> None:
        self.net = net
        net.partial_fit(X[:BATCH_SIZE], y[:BATCH_SIZE])
        net.history.new_epoch()
        self.source = net.get_iterator(net.get_dataset(X, y), training=True)
        if not loader:
            self.source = list(zip(X.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True))
        self.batches = iter(self.source)

    def __call__(self) -> None:
        """Make one step."""
        one = list(islice(self.batches, 1))
        if not one:
            self.batches = iter(self.source)
            one = [next(self.batches)]
        self.net.run_single_epoch(one, training=True, prefix="train", step_fn=self.net.train_step)
        if self.net.device.startswith("cuda"):
            torch.cuda.synchronize(self.net.device)


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run, judges nothing")
    parser.add_argument("--steps", type=int, help="steps of each net (default: 300)")
    parser.add_argument(
        "--resnet",
        metavar="DEVICE",
        default="cuda" if torch.cuda.is_available() else None,
        help="also time ResNet-18, there (default: on a CUDA device if there is one)",
    )
    add_data_argument(parser)
    arguments = parser.parse_args()
    steps = arguments.steps or (10 if arguments.quick else 300)
    images, y = load_images(2048 if arguments.quick else 12_800, arguments.data)
    pixels = images.flatten(1)[:, :784].contiguous()
    turn = min(TURN, steps)
    print(f"Training steps of {BATCH_SIZE} samples, {steps} of each net, {turn} in turn")
    print(environment())

    rows = [["training step", "median ms", "/ plain [quartiles]", "/ no penalty [quartiles]"]]
    found = {}
    all_but_dense = list(METHODS)[:-1]
    networks: list[tuple[str, Any, dict[str, Any], Tensor, list[str]]] = [
        ("LeNet-5", LeNet5, {}, images, list(METHODS)),
        ("MLP 784-256-128-10", MLP, IMAGE_MLP, pixels, all_but_dense),
    ]
    if arguments.resnet:
        where = {"device": arguments.resnet}
        networks.append(("ResNet-18", ResNet18, where, images, all_but_dense))
    for network, module, settings, X, names in networks:
        for loader in (True, False):
            runs = {
                name: Steps(METHODS[name](module, **settings), X, y, loader=loader)
                for name in names
            }
            # the dense Hessian takes its time: fewer rounds would do, but they take turns
            times = interleave(runs, steps // turn, warmup=2, turn=turn)
            title = network if loader else f"{network} without the loader"
            for name, seconds in times.items():
                median = f"{1000 * torch.tensor(seconds).median():.2f}"
                ratios = [ratio(seconds, times[other]) for other in ("plain", "no penalty")]
                rows.append([f"{title}, {name}", median, *map(str, ratios)])
                found[network, loader, name] = ratios[1].value
    print()
    print(table(rows))
    budgets = [
        Budget("LeNet-5, last layer / no penalty", found["LeNet-5", True, "last layer"], 1.05),
        Budget(
            "MLP, first layer / no penalty", found["MLP 784-256-128-10", True, "first layer"], 2.0
        ),
    ]
    if arguments.resnet:
        last = found["ResNet-18", True, "last layer"]
        name = f"ResNet-18 on {arguments.resnet}, last layer / no penalty"
        budgets.append(Budget(name, last, 1.05))
    return verdict(budgets, judged=not arguments.quick)


if __name__ == "__main__":
    sys.exit(main())

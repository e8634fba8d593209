"""Time of a training step with the penalty at the last layer, the first layer and all layers.

Each time is divided by that of the same net with a penalty weight of zero, to which the budgets
refer, and by that of skorch's own classifier. "No limit" is ``flatness_clip=None``. On a CUDA
device, ResNet-18 is timed as well, and all networks also in mixed precision (bfloat16).
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from skorch import NeuralNet, NeuralNetClassifier
from torch import Tensor, nn

from benchmarks._harness.data import load_images
from benchmarks._harness.networks import LeNet5, ResNet18
from benchmarks._harness.options import IMAGES, read_options
from benchmarks._harness.timing import Budget, compare, environment, interleave, ratio, verdict
from relflat_sk import MLP, RelativeFlatnessRegularizedClassifier, SharpnessAwareMixin

BATCH_SIZE = 128
# steps of an epoch, which one net makes in a row
TURN = 10
OURS = RelativeFlatnessRegularizedClassifier
RESNET_LIMITS = {"last layer": 1.05, "first layer": 2.5, "all layers": 3.0}


class SharpnessAwareNet(SharpnessAwareMixin, NeuralNetClassifier):
    """skorch's own classifier, trained by SAM."""


class MixedPrecision:
    """Forward passes of a net in bfloat16, as torch recommends it."""

    device: str

    def infer(self, *args: Any, **fit_params: Any) -> Any:
        """Run the network under autocast."""
        with torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16):
            return super().infer(*args, **fit_params)  # type: ignore[misc]


def make_net(
    estimator: type[NeuralNet], module: Any, *, mixed: bool = False, **arguments: object
) -> NeuralNet:
    """Make a net with the settings that all methods share."""
    torch.manual_seed(0)
    if mixed:
        estimator = type(f"Mixed{estimator.__name__}", (MixedPrecision, estimator), {})
    return estimator(
        module, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.SGD, lr=0.01,
        optimizer__momentum=0.9, batch_size=BATCH_SIZE, train_split=None, verbose=0,
        max_epochs=1,  # of the single batch that initialises the net
        **arguments,
    )  # fmt: skip


_LAYERS = {"last layer": -1, "first layer": 0, "all layers": "all"}
# method -> function that makes its net from a module
METHODS: dict[str, Callable[..., NeuralNet]] = {
    "plain": partial(make_net, NeuralNetClassifier),
    "no penalty": partial(make_net, OURS, flatness_weight=0.0),
    **{name: partial(make_net, OURS, flatness_layer=layer) for name, layer in _LAYERS.items()},
    **{
        f"{name}, no limit": partial(make_net, OURS, flatness_layer=layer, flatness_clip=None)
        for name, layer in _LAYERS.items()
    },
    "SAM": partial(make_net, SharpnessAwareNet),
}
IMAGE_MLP_NAME = "MLP 784-256-128-10"
IMAGE_MLP = partial(MLP, 784, 10, (256, 128))


class Epochs:
    """Epochs of one net, which is initialised on the first batch, trained as in `fit`."""

    def __init__(self, net: NeuralNet, X: Tensor, y: Tensor) -> None:
        self.net = net
        net.partial_fit(X[:BATCH_SIZE], y[:BATCH_SIZE])
        self.batches = net.get_iterator(net.get_dataset(X, y), training=True)

    def __call__(self) -> None:
        """Train for an epoch."""
        net = self.net
        net.history.new_epoch()
        net.run_single_epoch(self.batches, training=True, prefix="train", step_fn=net.train_step)


def main() -> int:
    options = read_options(
        __doc__, steps=(300, 1), device="cpu", resnet=False, mixed=False, data=IMAGES
    )
    if options.device != "cpu":
        options.resnet = options.mixed = True
    steps = options.steps
    images, y = load_images(TURN * BATCH_SIZE, options.data)
    turn = min(TURN, max(1, steps // 8))  # eight rounds at least
    print(f"Training steps of {BATCH_SIZE} samples on {options.device}")
    print(f"{steps} steps of each net, {turn} in an epoch")
    print(environment())
    compared = {}
    for network in _networks(images, options):
        times = _time(network, y, steps, turn)
        print(f"\n{network.name}\n{compare(times, 'plain', 'no penalty').to_string()}")
        for name, seconds in times.items():
            compared[f"{network.name}, {name}"] = ratio(seconds, times["no penalty"]).value
    return verdict(_budgets(compared, options.device), judged=not options.quick)


class Timed(NamedTuple):
    """A network to time, with its settings, its inputs, and the methods."""

    name: str
    module: Any
    settings: dict[str, Any]
    X: Tensor
    methods: list[str]


def _networks(images: Tensor, options: Namespace) -> list[Timed]:
    """List the networks, in float32 and in mixed precision."""
    device = {"device": options.device}
    pixels = images.flatten(1)[:, :784].contiguous()
    few = [name for name in METHODS if "no limit" not in name]
    networks = [
        Timed("LeNet-5", LeNet5, device, images, list(METHODS)),
        Timed(IMAGE_MLP_NAME, IMAGE_MLP, device, pixels, list(METHODS)),
    ]
    if options.resnet:
        networks.append(Timed("ResNet-18", ResNet18, device, images, few))
    if options.mixed:
        networks += [
            Timed(f"{name} in bfloat16", module, device | {"mixed": True}, X, few)
            for name, module, _, X, _ in networks
        ]
    return networks


def _time(network: Timed, y: Tensor, steps: int, turn: int) -> dict[str, list[float]]:
    """Time the steps of all methods: epochs of `turn` steps, in turn."""
    n = turn * BATCH_SIZE
    ways = {}
    for name in network.methods:
        net = METHODS[name](network.module, **network.settings)
        ways[name] = Epochs(net, network.X[:n], y[:n])
    times = interleave(ways, steps // turn, warmup=2)
    return {name: [each / turn for each in seconds] for name, seconds in times.items()}


def _budgets(compared: dict[str, float], device: str) -> list[Budget]:
    """Compare ratios to steps without penalty with their limits.

    On a GPU, a small network's step takes as long as its operations take to launch: the limits of
    LeNet-5 there are those of the numbers of operations.
    """
    limits: dict[str, dict[str, float]] = {
        "LeNet-5": {"last layer, no limit": 1.05, "last layer": 1.10},
        IMAGE_MLP_NAME: {"first layer, no limit": 2.0, "first layer": 2.2},
        "ResNet-18": RESNET_LIMITS,
    }
    if device != "cpu":
        limits = {
            "LeNet-5": {"last layer, no limit": 1.2, "last layer": 1.4, "first layer": 1.99},
            "ResNet-18": RESNET_LIMITS,
            "ResNet-18 in bfloat16": {"last layer": 1.05},
        }
    return [
        Budget(f"{name} / no penalty", compared[name], limit)
        for network, of_network in limits.items()
        for method, limit in of_network.items()
        if (name := f"{network}, {method}") in compared
    ]


if __name__ == "__main__":
    raise SystemExit(main())

"""Time and memory of scoring LeNet-5, next to a forward pass and to a dense Hessian.

On a CUDA device, ResNet-18 is timed next to its forward pass, too, and its budget is 1.2.

python -m benchmarks.costs.scoring            # 3 to 5 minutes
python -m benchmarks.costs.scoring --device cuda
python -m benchmarks.costs.scoring --quick    # a smoke run without verdict
"""

import argparse
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks._harness.data import add_data_argument, load_images
from benchmarks._harness.memory import in_fresh_process, peak_growth
from benchmarks._harness.networks import Head, LeNet5, ResNet18
from benchmarks._harness.timing import Budget, environment, interleave, ratio, table, verdict
from relflat_sk import relative_flatness

CRITERION = nn.CrossEntropyLoss()

Way = Callable[[nn.Module, Tensor, Tensor, int], float]


def _batches(X: Tensor, y: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(X.split(batch_size), y.split(batch_size), strict=True)


def forward(model: nn.Module, X: Tensor, y: Tensor, batch_size: int) -> float:
    """Run the network and discard its outputs: the lower bound for the cost of any score."""
    with torch.no_grad():
        for x, _ in _batches(X, y, batch_size):
            model(x)
    return float("nan")


def scoring(model: nn.Module, X: Tensor, y: Tensor, batch_size: int) -> float:
    """Measure relative flatness by the public function."""
    return relative_flatness(model, X, y, criterion=CRITERION, batch_size=batch_size)


def _dense(hessian: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> Way:
    """Compute Definition 3 as it is written, from a function that returns a dense Hessian."""

    def way(model: nn.Module, X: Tensor, y: Tensor, batch_size: int) -> float:
        fixed = {name: p.detach() for name, p in model.named_parameters()}
        weight = fixed.pop("head.weight")
        total = 0.0
        for x, target in _batches(X, y, batch_size):

            def risk(w: Tensor, x: Tensor = x, target: Tensor = target) -> Tensor:
                return CRITERION(functional_call(model, fixed | {"head.weight": w}, x), target)

            blocks = hessian(risk, weight)  # (10, 84, 10, 84)
            traces = torch.einsum("sjtj->st", blocks)
            total += len(x) * float((weight @ weight.T * traces).sum())
        return total / len(X)

    return way


WAYS: dict[str, Way] = {
    "forward": forward,
    "scoring": scoring,
    "torch.func.hessian": _dense(lambda risk, w: torch.func.hessian(risk)(w)),
    "autograd.functional.hessian": _dense(torch.autograd.functional.hessian),
}


def main() -> int:
    """Measure, print, and return the exit code."""
    arguments = _parse()
    if arguments.peak_of:  # in a fresh process, which `_memory` started
        print(_peak(arguments))
        return 0
    images = "random" if arguments.data is None else "CIFAR-10"
    print(f"Scoring LeNet-5 on {arguments.n_samples:,} images ({images}), {arguments.device}")
    print(environment())
    budgets = [*_times(arguments), _memory(arguments)]
    return verdict(budgets, judged=not arguments.quick)


def _model_and_data(arguments: argparse.Namespace) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    X, y = load_images(arguments.n_samples, arguments.data)
    device = torch.device(arguments.device)
    return LeNet5().eval().to(device), X.to(device), y.to(device)


def _peak(arguments: argparse.Namespace) -> int:
    """Measure the growth of memory in this process, in bytes."""
    model, X, y = _model_and_data(arguments)
    way = WAYS[arguments.peak_of]
    if not arguments.cold:
        way(model, X[:64], y[:64], arguments.batch_size)
    return peak_growth(lambda: way(model, X, y, arguments.batch_size), arguments.device)


def _times(arguments: argparse.Namespace) -> list[Budget]:
    """Time scoring next to the forward pass and next to dense Hessians."""
    model, X, y = _model_and_data(arguments)
    few = slice(arguments.n_dense)
    # a small network's pass takes as long on a GPU as its operations take to launch, and Python
    limit = 1.25 if arguments.device == "cpu" else 4.5
    budgets = [_time_forward("LeNet-5", model, X, y, arguments, limit)]
    if arguments.device != "cpu" or arguments.resnet:
        resnet = ResNet18().eval().to(X.device)
        budgets.append(_time_forward("ResNet-18", resnet, X[few], y[few], arguments, 1.2))
    print(f"\nThe whole network, {len(X[few]):,} images: every way contains the forward pass")
    _time_dense(model, X[few], y[few], arguments)
    with torch.no_grad():
        features = model.features(X[few])
    print("\nThe measure by itself, on the last layer's features, which every way needs")
    return [*budgets, *_time_dense(Head(model), features, y[few], arguments)]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smoke run without verdict")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--resnet", action="store_true", help="time ResNet-18 on a CPU, too")
    parser.add_argument("--n-samples", type=int, help="images to score (default: 50,000)")
    parser.add_argument("--n-dense", type=int, help="images for the dense Hessian (default: 4,096)")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, help="timed rounds (default: 9)")
    parser.add_argument("--peak-of", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    add_data_argument(parser)
    arguments = parser.parse_args()
    usual = {"n_samples": 50_000, "n_dense": 4096, "rounds": 9}
    quick = {"n_samples": 256, "n_dense": 16, "rounds": 1}
    for name, value in (quick if arguments.quick else usual).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def _time_forward(
    network: str,
    model: nn.Module,
    X: Tensor,
    y: Tensor,
    arguments: argparse.Namespace,
    limit: float,
) -> Budget:
    """Compare with a forward pass, on a CPU in parts of a few batches.

    The load of a machine changes within seconds, so the two passes over a part follow each other. A
    GPU takes a fraction of a second for all parts.
    """
    ways = ("forward", "scoring")
    size, n_parts = arguments.batch_size, 1
    if X.device.type == "cpu":
        n_parts = max(1, len(X) // (5 * size))
    parts = list(zip(X.chunk(n_parts), y.chunk(n_parts), strict=True))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for part in parts:
        calls = {name: lambda way=WAYS[name], part=part: way(model, *part, size) for name in ways}
        for name, seconds in interleave(calls, arguments.rounds).items():
            times[name] += seconds
    rows = [["time", "seconds in all", "/ forward [quartiles]"]]
    for name, seconds in times.items():
        in_all = f"{sum(seconds) / arguments.rounds:.3f}"
        rows.append([name, in_all, str(ratio(seconds, times["forward"]))])
    print(f"\n{network}, {len(X):,} images in batches of {size}; {n_parts} parts, ", end="")
    print(f"{arguments.rounds} rounds\n")
    print(table(rows))
    value = ratio(times["scoring"], times["forward"]).value
    name = "scoring / forward" if network == "LeNet-5" else f"{network}, scoring / forward"
    return Budget(name, value, limit)


def _time_dense(
    model: nn.Module, X: Tensor, y: Tensor, arguments: argparse.Namespace
) -> list[Budget]:
    """Compare with dense Hessians on the same images, without extrapolation."""
    size = arguments.batch_size
    dense = [name for name in WAYS if "hessian" in name]
    values: dict[str, float] = {}

    def run(name: str) -> None:
        values[name] = WAYS[name](model, X, y, size)

    ways = {name: lambda name=name: run(name) for name in ("forward", "scoring", *dense)}
    times = interleave(ways, min(arguments.rounds, 5))
    rows = [["time", "median s", "/ scoring [quartiles]", "/ forward", "value", "differs by"]]
    for name, seconds in times.items():
        if name == "forward":
            continue
        off = abs(values[name] / values["scoring"] - 1)
        if not off <= 1e-4:  # float32
            raise RuntimeError(f"{name} gives {values[name]}, not {values['scoring']}.")
        median = f"{torch.tensor(seconds).median():.3f}"
        compared = str(ratio(seconds, times["scoring"]))
        forwards = f"{ratio(seconds, times['forward']).value:.3g}"
        rows.append([name, median, compared, forwards, f"{values[name]:.6g}", f"{off:.0e}"])
    print(f"{len(X):,} samples in batches of {size}, the same for all\n")
    print(table(rows))
    return [
        Budget(
            f"{name} / scoring, the measure by itself",
            ratio(times[name], times["scoring"]).value,
            20,
            at_least=True,
        )
        for name in dense
    ]


def _memory(arguments: argparse.Namespace) -> Budget:
    """Compare peaks of memory, of the first and of a later call in a process."""
    options = [
        part
        for name in ("n_samples", "batch_size", "device")
        for part in (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))
    ]
    if arguments.data is not None:
        options += ["--data", arguments.data]

    def peak(name: str, *more: str) -> float:
        return (
            in_fresh_process("benchmarks.costs.scoring", ["--peak-of", name, *options, *more])
            / 2**20
        )

    rows = [["peak memory, growth in MiB", "forward", "scoring", "scoring / forward"]]
    calls = {"first call": ["--cold"], "later call": []}
    if arguments.quick:
        del calls["first call"]
    for label, more in calls.items():
        below, above = peak("forward", *more), peak("scoring", *more)
        rows.append([label, f"{below:.1f}", f"{above:.1f}", f"{above / below:.3g}"])
    print(
        f"\n{arguments.n_samples:,} images, memory of fresh processes; on a CPU, a first call also"
    )
    print("loads library code, a fixed amount; budgeted is the later one, after one of 64 images\n")
    print(table(rows))
    return Budget("peak memory, scoring / forward", above / below, 1.1)


if __name__ == "__main__":
    sys.exit(main())

"""Time and memory of scoring LeNet-5, next to a forward pass and to a dense Hessian.

On a CUDA device, ResNet-18 is timed next to its forward pass, too, and its budget is 1.2.
"""

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks._harness.data import load_images
from benchmarks._harness.memory import peak_growth, peak_in_fresh_process
from benchmarks._harness.networks import LeNet5, ResNet18
from benchmarks._harness.options import IMAGES, read_options
from benchmarks._harness.timing import Budget, compare, environment, interleave, ratio, verdict
from relflat_sk import relative_flatness

CRITERION = nn.CrossEntropyLoss()
BATCH_SIZE = 1024

Way = Callable[[nn.Module, Tensor, Tensor], float]


def _batches(X: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(X.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True)


def forward(model: nn.Module, X: Tensor, y: Tensor) -> float:
    """Run the network and discard its outputs: the lower bound for the cost of any score."""
    with torch.no_grad():
        for x, _ in _batches(X, y):
            model(x)
    return float("nan")


def scoring(model: nn.Module, X: Tensor, y: Tensor) -> float:
    """Measure relative flatness by the public function."""
    return relative_flatness(model, X, y, criterion=CRITERION, batch_size=BATCH_SIZE)


def _dense(hessian: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> Way:
    """Compute Definition 3 as it is written, from a function that returns a dense Hessian."""

    def way(model: nn.Module, X: Tensor, y: Tensor) -> float:
        fixed = {name: p.detach() for name, p in model.named_parameters()}
        weight = fixed.pop("head.weight")
        total = 0.0
        for x, target in _batches(X, y):

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
    options = read_options(
        __doc__, n_samples=(50_000, 256), n_dense=(4096, 16), rounds=(9, 1), device="cpu",
        resnet=False, data=IMAGES, peak_of=str,
    )  # fmt: skip
    if options.peak_of:  # in a fresh process, which `_memory` started
        print(_peak(options))
        return 0
    images = "random" if options.data is None else "CIFAR-10"
    print(f"Scoring LeNet-5 on {options.n_samples:,} images ({images}), {options.device}")
    print(environment())
    budgets = [*_times(options), _memory(options)]
    return verdict(budgets, judged=not options.quick)


def _model_and_data(options: Namespace) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    X, y = load_images(options.n_samples, options.data)
    device = torch.device(options.device)
    return LeNet5().eval().to(device), X.to(device), y.to(device)


def _peak(options: Namespace) -> int:
    """Measure the growth of memory in this process, in bytes."""
    model, X, y = _model_and_data(options)
    way = WAYS[options.peak_of]
    way(model, X[:64], y[:64])
    return peak_growth(lambda: way(model, X, y), options.device)


def _times(options: Namespace) -> list[Budget]:
    """Time scoring next to the forward pass and next to dense Hessians."""
    model, X, y = _model_and_data(options)
    few = slice(options.n_dense)
    # a small network's pass takes as long on a GPU as its operations take to launch, and Python
    limit = 1.25 if options.device == "cpu" else 4.5
    budgets = [_time_forward("LeNet-5", model, X, y, options, limit)]
    if options.device != "cpu" or options.resnet:
        resnet = ResNet18().eval().to(X.device)
        budgets.append(_time_forward("ResNet-18", resnet, X[few], y[few], options, 1.2))
    print(f"\nThe whole network, {len(X[few]):,} images: every way contains the forward pass")
    _time_dense(model, X[few], y[few], options)
    with torch.no_grad():
        features = model.features(X[few])
    print("\nThe measure by itself, on the last layer's features, which every way needs")
    head = nn.Sequential(OrderedDict(head=model.head))
    return [*budgets, *_time_dense(head, features, y[few], options)]


def _time_forward(
    network: str, model: nn.Module, X: Tensor, y: Tensor, options: Namespace, limit: float
) -> Budget:
    """Compare with a forward pass, on a CPU in parts of a few batches.

    The load of a machine changes within seconds, so the two passes over a part follow each other. A
    GPU takes a fraction of a second for all parts.
    """
    n_parts = max(1, len(X) // (5 * BATCH_SIZE)) if X.device.type == "cpu" else 1
    times: dict[str, list[float]] = {"forward": [], "scoring": []}
    for part in zip(X.chunk(n_parts), y.chunk(n_parts), strict=True):
        calls = {name: lambda way=WAYS[name], part=part: way(model, *part) for name in times}
        for name, seconds in interleave(calls, options.rounds).items():
            times[name] += seconds
    print(f"\n{network}, {len(X):,} images in batches of {BATCH_SIZE}; {n_parts} parts, ", end="")
    print(f"{options.rounds} rounds\n\n{compare(times, 'forward').to_string()}")
    value = ratio(times["scoring"], times["forward"]).value
    name = "scoring / forward" if network == "LeNet-5" else f"{network}, scoring / forward"
    return Budget(name, value, limit)


def _time_dense(model: nn.Module, X: Tensor, y: Tensor, options: Namespace) -> list[Budget]:
    """Compare with dense Hessians on the same images, without extrapolation."""
    values: dict[str, float] = {}

    def run(name: str) -> None:
        values[name] = WAYS[name](model, X, y)

    ways = {name: lambda name=name: run(name) for name in WAYS}
    times = interleave(ways, min(options.rounds, 5))
    dense = [name for name in WAYS if "hessian" in name]
    for name in dense:
        if not abs(values[name] / values["scoring"] - 1) <= 1e-4:  # float32
            raise RuntimeError(f"{name} gives {values[name]}, not {values['scoring']}.")
    print(f"{len(X):,} samples in batches of {BATCH_SIZE}, the same for all\n")
    print(compare(times, "scoring", "forward").assign(value=values).to_string())
    return [
        Budget(f"{name} / scoring, the measure by itself",
               ratio(times[name], times["scoring"]).value, 20, at_least=True)
        for name in dense
    ]  # fmt: skip


def _memory(options: Namespace) -> Budget:
    """Compare peaks of memory; the first call in a process also loads code, a fixed amount."""

    def peak(name: str) -> float:
        return peak_in_fresh_process("benchmarks.costs.scoring", "--peak-of", name) / 2**20

    below, above = peak("forward"), peak("scoring")
    print(f"\n{options.n_samples:,} images, peak growth of memory in fresh processes after a")
    print(f"call with 64 images: forward {below:.1f} MiB, scoring {above:.1f} MiB")
    return Budget("peak memory, scoring / forward", above / below, 1.1)


if __name__ == "__main__":
    raise SystemExit(main())

"""Training with the penalty in two processes by accelerate, next to one process.

python -m benchmarks.worth.processes            # a minute
python -m benchmarks.worth.processes --quick    # a smoke run without verdict

Each process has half of a batch, and the average of their gradients is the step. The table shows
how far the weights then are from those that one process finds with whole batches, as a share of
the way from the initial weights.
"""

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor

from benchmarks._harness.timing import Budget, environment, table, verdict

SETTINGS: dict[str, dict[str, Any]] = {
    "no penalty": {"flatness_weight": 0.0},
    "last layer, no limit": {"flatness_clip": None},
    "last layer, limit 0.5": {},
    "last layer, weight 10, limit 0.5": {"flatness_weight": 10.0},
    "last layer, normalised, no limit": {"flatness_normalize": True, "flatness_clip": None},
    "first layer, no limit": {"flatness_layer": 0, "flatness_clip": None},
    "first layer, limit 0.5": {"flatness_layer": 0},
}
# whose penalty of the whole batch is the mean of the halves'
EQUAL = ("no penalty", "last layer, no limit")
QUICK, QUICK_EPOCHS = (*EQUAL, "last layer, limit 0.5"), 1


def _net(kind: Any, size: int, **settings: Any) -> Any:
    optimizer = {"optimizer": torch.optim.SGD, "lr": 0.1}
    order = {"batch_size": size, "iterator_train__shuffle": False}
    given = {"flatness_weight": 0.1, "verbose": 0, "random_state": 0, **optimizer, **order}
    return kind(**{**given, **settings})


def _weights(net: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.module_.parameters()])


def _results(kind: Any, size: int, n_epochs: int, **more: Any) -> dict[str, tuple[Tensor, float]]:
    """Train with all settings; return weights and the recorded flatness."""
    X, y = load_digits(return_X_y=True)
    X, y = X[:1536].astype("float32") / 16, y[:1536]
    found = {}
    for name in SETTINGS if n_epochs > QUICK_EPOCHS else QUICK:
        settings = SETTINGS[name]
        net = _net(kind, size, max_epochs=n_epochs, **settings, **more).fit(X, y)
        found[name] = _weights(net), net.relative_flatness_
    return found


def _train_shard(n_epochs: int, folder: str) -> None:
    """Train in one of two processes, and save what it finds."""
    from accelerate import Accelerator  # noqa: PLC0415
    from skorch.hf import AccelerateMixin  # noqa: PLC0415

    from relflat_sk import RelativeFlatnessRegularizedNet  # noqa: PLC0415

    class WithoutCriteria(Accelerator):
        """Leaves modules without parameters alone, which torch cannot train in parallel."""

        def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            if not any(p.requires_grad for p in model.parameters()):
                return model
            return super().prepare_model(model, *args, **kwargs)

    class Net(AccelerateMixin, RelativeFlatnessRegularizedNet):
        """A net whose processes share each batch."""

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    found = _results(Net, 32, n_epochs, accelerator=WithoutCriteria(cpu=True))
    Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(found))
    os._exit(0)  # threads of gloo can abort a process that ends under load


def _in_two_processes(n_epochs: int) -> list[dict[str, tuple[Tensor, float]]]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.worth.processes", "--shard"]
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for rank in ("0", "1"):
            told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost", **told}
            arguments = [*command, str(n_epochs), folder]
            # accelerate's mixin prints each epoch
            running.append(subprocess.Popen(arguments, env=env, stdout=subprocess.DEVNULL))
        if any([process.wait() for process in running]):  # noqa: C419  # waits for both
            raise RuntimeError("training in two processes failed")
        return [pickle.loads(Path(folder, f"{rank}.pkl").read_bytes()) for rank in (0, 1)]


def main() -> int:
    """Print the table and the verdict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smoke run without verdict")
    parser.add_argument("--shard", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.shard is not None:
        _train_shard(int(arguments.shard[0]), arguments.shard[1])
        return 0
    from relflat_sk import RelativeFlatnessRegularizedNet as Net  # noqa: PLC0415

    print(environment())
    n_epochs = QUICK_EPOCHS if arguments.quick else 20
    shards, alone = _in_two_processes(n_epochs), _results(Net, 64, n_epochs)
    start = _results(Net, 64, 0)["no penalty"][0]
    rows = [["digits, MLP 64-100-10", "way between weights", "flatness, two", "flatness, one"]]
    budgets = []
    for name, (weights, flatness) in alone.items():
        first, second = (shard[name][0] for shard in shards)
        if not torch.equal(first, second):
            raise RuntimeError(f"{name}: the processes have different weights.")
        apart = float((first - weights).norm() / (weights - start).norm())
        rows.append([name, f"{apart:.2g}", f"{shards[0][name][1]:.5g}", f"{flatness:.5g}"])
        limit = 1e-4 if name in EQUAL else 0.05
        budgets.append(Budget(f"{name}, way between weights", apart, limit))
    print(f"\n2 x 32 samples in a step, and 64 in one process; {n_epochs} epochs\n")
    print(table(rows))
    return verdict(budgets, judged=not arguments.quick)


if __name__ == "__main__":
    sys.exit(main())

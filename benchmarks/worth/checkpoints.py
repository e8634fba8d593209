"""Compare ways to choose a checkpoint of a training run, by the regret of the choice.

Twenty runs: four tasks with five seeds each, and a checkpoint after each of 40 epochs. The adapter
of a transformer needs transformers and peft. The ways:

comparable flatness   the smallest, at a loss that half of the checkpoints reach; no data held out
relative flatness     the smallest, among those of similar depth; no data held out
head gradient         the smallest norm of the loss's gradient in the last layer, among the
                      checkpoints of the last third
last                  the last checkpoint
training loss         the smallest
held-out loss         the epoch of the smallest loss on a fifth of the training data, in a second
                      run on the other four fifths; the checkpoint is that of the run on all data
any                   the mean over the checkpoints

The regret is the difference to the best checkpoint on the test data: in points, and in loss.
"""

import copy
import math
import warnings
from collections.abc import Callable
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks._harness.networks import epochs
from benchmarks._harness.options import read_options
from benchmarks._harness.timing import environment
from relflat_sk import FlatnessScorer, FlatnessWarning, rank_minima, rank_models

CRITERION = nn.CrossEntropyLoss()


class Task(NamedTuple):
    """A network with the data on which it is trained and tested."""

    net: nn.Module
    X: Tensor
    y: Tensor
    X_test: Tensor
    y_test: Tensor


def logits(output: Any) -> Tensor:
    """Return what the criterion takes of an output."""
    found: Tensor = output if isinstance(output, Tensor) else output["logits"]
    return found


def train(
    net: nn.Module, X: Tensor, y: Tensor, n_epochs: int, seed: int, lr: float = 0.01, size: int = 16
) -> list[dict[str, Tensor]]:
    """Train by Adam, and return the weights after each epoch."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=lr)
    net.train()
    training = epochs(
        lambda rows: CRITERION(logits(net(X[rows])), y[rows]),
        optimizer, len(y), size, generator,
    )  # fmt: skip
    return [copy.deepcopy(net.state_dict()) for _ in islice(training, n_epochs)]


# -- tasks -----------------------------------------------------------------------------------------


def digits(seed: int, classes: range, n_train: int, shape: tuple[int, ...]) -> list[Tensor]:
    """Draw images of some digits, for training and for tests."""
    X, y = load_digits(return_X_y=True)
    kept = np.flatnonzero(np.isin(y, classes))
    order = np.random.default_rng(seed).permutation(kept)
    images = torch.tensor(X[order] / 16, dtype=torch.float32).reshape(-1, *shape)
    labels = torch.tensor(y[order]) - classes.start
    return [images[:n_train], labels[:n_train], images[n_train:], labels[n_train:]]


def with_wrong(y: Tensor, share: float, n_classes: int, seed: int) -> Tensor:
    """Give a share of the samples another label."""
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.rand(len(y), generator=generator) < share
    moves = torch.randint(1, n_classes, y.shape, generator=generator)
    return torch.where(wrong, (y + moves) % n_classes, y)


def mlp(seed: int, share: float) -> Task:
    """Make a network with one hidden layer, and digits with a share of wrong labels."""
    X, y, *test = digits(seed, range(10), 300, (64,))
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return Task(net, X, with_wrong(y, share, 10, seed), *test)


def convolutions(seed: int) -> Task:
    """Make a network that knows the digits 0 to 4, and 100 images of the others."""
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5),
    )  # fmt: skip
    X, y, *_ = digits(seed, range(5), 600, (1, 8, 8))
    train(net, X, y, 5, seed, lr=0.005)
    X, y, *test = digits(seed, range(5, 10), 100, (1, 8, 8))
    return Task(net, X, with_wrong(y, 0.1, 5, seed), *test)


def adapter(seed: int) -> Task:
    """Make a transformer that knows a task, with an adapter for another one."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415
    from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415

    def sequences(n: int, first: int) -> list[Tensor]:
        tokens = torch.randint(12, (n, 15))
        counts = torch.stack([(tokens == first + i).sum(1) for i in range(3)], dim=1)
        return [tokens, (counts + 0.1 * torch.rand(n, 3)).argmax(1)]

    config = BertConfig(
        vocab_size=12, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    base = BertForSequenceClassification(config)
    train(base, *sequences(2000, 0), 6, seed, lr=2e-3, size=32)
    lora = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    return Task(get_peft_model(base, lora), *sequences(100, 3), *sequences(1000, 3))


TASKS: dict[str, Callable[[int], Task]] = {
    "digits": lambda seed: mlp(seed, 0.0),
    "digits, wrong labels": lambda seed: mlp(seed, 0.1),
    "fine-tuned convolutions": convolutions,
    "adapter": adapter,
}


# -- choosing --------------------------------------------------------------------------------------


def outputs_of(net: nn.Module, saved: list[dict[str, Tensor]], X: Tensor) -> Tensor:
    """Compute the logits of each checkpoint."""
    found = []
    for weights in saved:
        net.load_state_dict(weights)
        with torch.no_grad():
            found.append(logits(net.eval()(X)))
    return torch.stack(found)  # (checkpoints, n, classes)


def loss_of(outputs: Tensor, y: Tensor) -> float:
    """Return the mean loss of a checkpoint."""
    return float(CRITERION(outputs, y))


def reachable_share(outputs: Tensor, y: Tensor) -> float:
    """Return the share of a constant's loss that half of those that have learned reach, from 0.1.

    A network reaches the smallest of its losses at all temperatures.
    """
    counts = torch.bincount(y)
    constant = loss_of(torch.log(counts / len(y)).expand(len(y), -1), y)
    shares = [
        min(loss_of(beta * z, y) for beta in (1.0, *np.logspace(-2, 3, 200))) / constant
        for z in outputs
        if loss_of(z, y) < constant
    ]
    half = sorted(shares)[(len(shares) - 1) // 2] if shares else 0.0
    return min(max(0.1, math.ceil(100 * half) / 100), 0.99)


def run(name: str, seed: int, n_epochs: int) -> pd.DataFrame:
    """Train once, and return the regret of each way (rows): points of accuracy, and loss."""
    torch.manual_seed(seed)
    net, X, y, X_test, y_test = TASKS[name](seed)
    start = copy.deepcopy(net.state_dict())
    saved = train(net, X, y, n_epochs, seed)
    at_loss = reachable_share(outputs_of(net, saved, X), y)
    comparable = FlatnessScorer("comparable_flatness", measure_params={"at_loss": at_loss})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlatnessWarning)  # early checkpoints are no minima
        ranked = rank_models(
            saved, X, y, module=net, criterion=CRITERION,
            measure=[comparable, "relative_flatness", "gradient_norm"],
        )  # fmt: skip
    along = ranked.sort_values("trial").reset_index(drop=True)
    of_test = outputs_of(net, saved, X_test)
    losses = np.array([loss_of(z, y_test) for z in of_test])
    points = 100 * (of_test.argmax(2) == y_test).double().mean(1).numpy()
    n = len(y) * 4 // 5
    net.load_state_dict(start)
    parts = train(net, X[:n], y[:n], n_epochs, seed)
    held_out = [loss_of(z, y[n:]) for z in outputs_of(net, parts, X[n:])]
    tail = n_epochs * 2 // 3
    picks = {
        "comparable flatness": pick(ranked, "comparable_flatness"),
        "relative flatness": pick(ranked, "relative_flatness"),
        "head gradient": tail + int(along["gradient_norm"][tail:].to_numpy().argmin()),
        "last": n_epochs - 1,
        "training loss": int(along["train_loss"].argmin()),
        "held-out loss": int(np.argmin(held_out)),
    }
    regret = pd.DataFrame({"points": points.max() - points, "loss": losses - losses.min()})
    found = pd.DataFrame(
        {way: regret.loc[at] for way, at in picks.items()} | {"any": regret.mean()}
    )
    is_measured = along["converged"]
    return found.T.assign(task=name, seed=seed, unmeasured=(~is_measured).sum(), at_loss=at_loss)


def pick(ranked: pd.DataFrame, measure: str) -> int:
    """Return the checkpoint that ranks first; the last one if no checkpoint is compared."""
    band = None if measure == "comparable_flatness" else 3.0
    first = rank_minima(ranked, measure, depth_band=band).iloc[0]
    return int(first["trial"]) if first["comparable"] else len(ranked) - 1


def main() -> None:
    options = read_options(__doc__, tasks=TASKS, seeds=(5, 1), epochs=(40, 3))
    print(environment())
    runs = list(product(options.tasks, range(options.seeds)))
    tables = [run(*one, options.epochs) for one in tqdm(runs, desc="runs")]
    rows = pd.concat(tables).rename_axis("regret of the choice")
    by_way = rows.groupby(level=0, sort=False)[["points", "loss"]]
    print(f"{len(runs)} runs with {options.epochs} checkpoints each; columns of tasks in points")
    table = by_way.mean().add_suffix(", all runs").join(by_way.sem().add_suffix(", stderr"))
    of_tasks = rows.pivot_table("points", rows.index, "task", sort=False)
    print(table.join(of_tasks).to_string(float_format="{:.3f}".format))
    for task, some in rows.loc["any":"any"].groupby("task", sort=False):
        n, shares = some["unmeasured"].sum(), some["at_loss"].to_list()
        print(f"{task}: {n} checkpoints not compared, others at {shares} of a constant's loss")


if __name__ == "__main__":
    main()

"""Rank the minima of a sweep over batch sizes by relative flatness, and test the ranking.

The script trains one network for every batch size and seed on a small training set, all to the
same training loss. It ranks the networks by their flatness on the training data alone, and
compares the flattest and the mean of all with the candidate that 5-fold cross-validation chooses.
Most images are held out, and only serve to evaluate these. The result is printed, whether it favors
flatness or not. The networks are small, and are trained many at a time as one stacked model.

    python examples/rank_minima.py            # the run of `make demo`
    python examples/rank_minima.py --quick    # a few small candidates
"""

import argparse
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, StratifiedKFold, train_test_split
from skorch.callbacks import Callback
from tqdm import tqdm

from relflat_sk import (
    FlatMinimaSearch,
    FlatnessGapDisplay,
    MinimaRankingDisplay,
    RelativeFlatnessRegularizedClassifier,
    StopAtLoss,
    correlate_measures,
    fleet_training,
    granulated_kendall,
)

BATCH_SIZES = [16, 32, 64, 128, 256]
BASE_LR, BASE_BATCH = 0.05, 32


def linear_lr(batch_size):
    """Scale the learning rate with the batch size, so that the step per sample stays the same."""
    return BASE_LR * batch_size / BASE_BATCH


class Progress(Callback):
    """Count the networks whose training has ended, also of those that are trained together."""

    bar = None

    def on_train_end(self, net, **kwargs):
        Progress.bar.update()


def make_net(max_epochs, loss):
    """Return a net that stops at a training loss (nats)."""
    return RelativeFlatnessRegularizedClassifier(
        module__hidden_layer_sizes=(128, 128),
        flatness_weight=0,  # no penalty: flatness only ranks the trained networks
        optimizer=torch.optim.SGD,
        optimizer__momentum=0.9,
        iterator_train__shuffle=True,
        callbacks=[StopAtLoss(loss), Progress()],
        max_epochs=max_epochs,
        verbose=0,
    )


def sweep(net, data, batch_sizes, seeds, fleet):
    """Train a network for every batch size and seed, and measure its flatness."""
    X, X_test, y, y_test = data
    space = {
        "batch_size": batch_sizes,
        "lr": lambda trial: linear_lr(trial.params["batch_size"]),
        "random_state": seeds,
    }
    search = FlatMinimaSearch(net, space, fleet=fleet, n_threads=None)
    with tqdm(total=len(batch_sizes) * len(seeds), desc="minima") as Progress.bar:
        return search.fit(X, y, X_test=X_test, y_test=y_test)


def cross_validate(net, X, y, batch_sizes, seeds, fleet):
    """Choose among the same candidates by 5-fold cross-validation."""
    candidates = [
        {"batch_size": [b], "lr": [linear_lr(b)], "random_state": [seed]}
        for b in batch_sizes
        for seed in seeds
    ]
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    search = GridSearchCV(net, candidates, cv=folds, refit=False)
    bar = tqdm(total=5 * len(candidates), desc="cross-validation")
    with bar as Progress.bar, fleet_training(fleet):
        return search.fit(X, y)


def timed(function, *arguments):
    """Call a function; return its result, and the seconds that it took."""
    started = time.perf_counter()
    return function(*arguments), time.perf_counter() - started


def same_candidate(minima, params):
    """Return the row of the candidate with some parameters."""
    chosen = np.ones(len(minima), dtype=bool)
    for name in ("batch_size", "random_state"):
        chosen &= (minima[f"param_{name}"] == params[name]).to_numpy()
    return minima[chosen].iloc[0]


def compare(minima, mean, seconds, cv_params, cv_seconds):
    """Return held-out loss, held-out accuracy and seconds for each way to choose."""
    ranked = minima[minima["comparable"]]
    flattest, cv = minima.iloc[0], same_candidate(minima, cv_params)
    best = ranked.sort_values("test_loss").iloc[0]
    average = ranked[["test_score", "test_loss"]].mean()
    rows = [
        ("mean of all networks", *mean, seconds),
        ("flattest minimum", flattest["test_score"], flattest["test_loss"], seconds),
        ("5-fold cross-validation", cv["test_score"], cv["test_loss"], cv_seconds),
        ("average candidate", average["test_score"], average["test_loss"], seconds / len(minima)),
        ("best candidate (hindsight)", best["test_score"], best["test_loss"], np.nan),
    ]
    columns = ["choice", "held-out accuracy", "held-out loss", "seconds"]
    return pd.DataFrame(rows, columns=columns).set_index("choice").rename_axis(None)


def verdict(low, high):
    """Return what an interval of a rank correlation says of flatness and the gap."""
    if low > 0:
        return "flatter minima generalised better"
    return "flatter minima generalised WORSE" if high < 0 else "no relation beyond chance"


def in_words(table, correlation, granulated, n_test):
    """Return the result in words, whether it favors flatness or not.

    All minima together mix two questions: whether flatness tells batch sizes apart, and whether
    it tells the networks of one batch size apart. Each has its own coefficient.
    """
    kappa = correlation.set_index("measure").loc["relative_flatness"]
    granules = granulated.set_index("measure").loc["relative_flatness"]
    rows = [
        ("all minima, Kendall tau", kappa, "kendall"),
        ("batch sizes at equal seeds, granulated", granules, "psi_batch_size"),
        ("seeds at equal batch sizes, granulated", granules, "psi_random_state"),
    ]
    found = []
    for name, row, column in rows:
        low, high = row[f"{column}_low"], row[f"{column}_high"]
        interval = f"{row[column]:z.2f} [{low:z.2f}, {high:z.2f}]"
        found.append(f"  {name}: {interval}: {verdict(low, high)}")
    accuracy = table["held-out accuracy"]
    flat, average = accuracy["flattest minimum"], accuracy["average candidate"]
    mean = accuracy["mean of all networks"]
    cv, best = accuracy["5-fold cross-validation"], accuracy["best candidate (hindsight)"]
    noise = 2 * np.sqrt(flat * (1 - flat) / n_test)
    times = table["seconds"]
    ratio = times["5-fold cross-validation"] / times["flattest minimum"]
    return "\n".join([
        "Flatness against the generalisation gap, on one data set and one split:",
        *found,
        f"The mean of all networks has a held-out accuracy of {mean:.3f}.",
        f"The flattest minimum has {flat:.3f}: "
        f"{100 * (flat - average):+.1f} points against the average candidate,",
        f"  {100 * (flat - cv):+.1f} against the pick of cross-validation, which took {ratio:.1f} "
        "times as long,",
        f"  {100 * (flat - best):+.1f} against the best.",
        f"On {n_test} held-out images an accuracy is known to about +-{100 * noise:.1f} points.",
    ])


def draw(minima, path):
    """Save the two displays of the minima as one picture."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    FlatnessGapDisplay.from_minima(minima, ax=axes[0], random_state=0)
    MinimaRankingDisplay.from_minima(minima, ax=axes[1], random_state=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("out/minima.png"))
    parser.add_argument("--quick", action="store_true", help="a few small candidates")
    parser.add_argument("--fleet", type=int, default=60, help="networks at a time, 60 by default")
    parser.add_argument("--seeds", type=int, help="seeds for each batch size, 12 by default")
    parser.add_argument("--batch-sizes", type=int, nargs="+", help="16 to 256 by default")
    options = parser.parse_args(arguments)

    # with few training images, candidates differ in how well they generalise
    batch_sizes, seeds = ([8, 64], 2) if options.quick else (BATCH_SIZES, 12)
    batch_sizes, seeds = options.batch_sizes or batch_sizes, list(range(options.seeds or seeds))
    net = make_net(max_epochs=100 if options.quick else 500, loss=0.05 if options.quick else 0.01)
    X, y = load_digits(return_X_y=True)
    X, X_test, y, y_test = train_test_split(
        (X / 16).astype(np.float32), y, train_size=600, stratify=y, random_state=0
    )
    print(f"{len(batch_sizes) * len(seeds)} candidates on {len(X)} digits, {len(X_test)} held out.")
    started = time.perf_counter()
    chosen = batch_sizes, seeds, options.fleet
    search, seconds = timed(sweep, net, (X, X_test, y, y_test), *chosen)
    minima = search.minima_
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cv, cv_seconds = timed(cross_validate, net, X, y, *chosen)

    columns = ["rank", "param_batch_size", "relative_flatness", "train_loss", "generalization_gap",
               "test_score"]  # fmt: skip
    shown = minima[columns].rename(columns={"param_batch_size": "batch_size"})
    print(
        "\nMinima, flattest first:"
        if len(shown) <= 10
        else "\nThe 4 flattest and 3 sharpest minima:"
    )
    if len(shown) > 10:
        shown = pd.concat([shown.head(4), shown.tail(3)])
    print(shown.to_string(index=False, float_format=lambda v: f"{v:.4g}"))
    correlation = correlate_measures(minima, random_state=0)
    print("\nRank correlation with the generalisation gap, with 95% intervals:")
    kendall = ["measure", "n", "kendall", "kendall_low", "kendall_high"]
    print(correlation[kendall].to_string(index=False, float_format=lambda v: f"{v:z.2f}"))
    mean = search.score(X_test, y_test), log_loss(y_test, search.predict_proba(X_test))
    table = compare(minima, mean, seconds, cv.best_params_, cv_seconds)
    print("\nWhat each way to choose found and cost:")
    print(table.to_string(float_format=lambda v: f"{v:.3f}", na_rep="-"))
    granulated = granulated_kendall(minima, ["batch_size", "random_state"], random_state=0)
    print("\n" + in_words(table, correlation, granulated, len(X_test)))
    draw(minima, options.output)
    print(f"Picture: {options.output}. All in {time.perf_counter() - started:.0f} s.")


if __name__ == "__main__":
    main()

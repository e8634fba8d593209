"""Find mislabelled training samples by the flatness of the loss at each of them.

The script gives 5% of its training digits a wrong label and trains one network. After some epochs
it computes the terms of relative flatness, one number for each training sample, whose mean is the
flatness of the network. It compares how well these terms, the loss and the margin tell wrong
labels from right ones, by the area under the ROC curve: 1 is perfect, 0.5 is chance. The result is
printed, whether it favors flatness or not.

    python examples/sharp_samples.py
    python examples/sharp_samples.py --epochs 10 50 --seed 1
"""

import argparse

import numpy as np
import pandas as pd
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

from relflat_sk import RelativeFlatnessRegularizedClassifier, relative_flatness

N_SAMPLES = 900
WRONG = 0.05  # share of the labels


def mislabel(y, rng):
    """Return labels of which some are wrong, and which those are."""
    wrong = np.zeros(len(y), dtype=bool)
    wrong[rng.choice(len(y), size=round(WRONG * len(y)), replace=False)] = True
    given = y.copy()
    given[wrong] = (y[wrong] + rng.integers(1, 10, size=wrong.sum())) % 10
    return given, wrong


def losses_and_margins(net, X, y):
    """Return each sample's loss, and its logit minus the largest other logit."""
    logits = net.forward(X).numpy().astype(float)
    of_label = np.take_along_axis(logits, y[:, None], axis=1)[:, 0]
    others = logits.copy()
    np.put_along_axis(others, y[:, None], -np.inf, axis=1)
    return np.logaddexp.reduce(logits, axis=1) - of_label, of_label - others.max(axis=1)


def suspicions(net, X, y):
    """Return what may tell wrong labels from right ones, larger for a suspicious sample."""
    loss, margin = losses_and_margins(net, X, y)
    return {
        "loss": loss,
        "minus the margin": -margin,
        "flatness, first layer": relative_flatness(net, X, y, layer=0, per_sample=True),
        "flatness, last layer": relative_flatness(net, X, y, per_sample=True),
        "normalised flatness, last layer": relative_flatness(
            net, X, y, normalize=True, per_sample=True
        ),
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, nargs="+", default=[5, 30, 100])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    X, y = load_digits(return_X_y=True)
    X, y = (X[:N_SAMPLES] / 16).astype(np.float32), y[:N_SAMPLES]
    given, wrong = mislabel(y, np.random.default_rng(options.seed))
    net = RelativeFlatnessRegularizedClassifier(
        flatness_weight=0, verbose=0, random_state=options.seed
    )
    columns, trained = {}, 0
    for epochs in sorted(options.epochs):
        net.set_params(max_epochs=epochs - trained).partial_fit(X, given)
        trained = epochs
        fitted = (net.predict(X) == given)[wrong].mean()
        areas = {
            name: roc_auc_score(wrong, score) for name, score in suspicions(net, X, given).items()
        }
        columns[f"{epochs} epochs"] = {"wrong labels that the network fits": fitted, **areas}
    print(f"{len(y)} digits, {wrong.sum()} of them with a wrong label")
    print("Area under the ROC curve of what may tell wrong labels from right ones:")
    print(pd.DataFrame(columns).round(3).to_string())


if __name__ == "__main__":
    main()

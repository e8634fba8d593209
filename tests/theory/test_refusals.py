"""What functions of the theory refuse: one table of arguments and what the errors say."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

from relflat_sk import theory
from relflat_sk.theory import Smoothing
from tests.theory.problems import CE, network

NET, X, Y = network(activation=nn.ReLU)
SEQUENCES = {"model": nn.Linear(2, 2), "X": torch.randn(6, 4, 2), "y": torch.zeros(6, 4).long()}
FEW = {"X": torch.randn(7, 5).double(), "y": torch.zeros(7).long()}
OWN = "the initial weights are those of the trained net"
WEIGHTED = nn.CrossEntropyLoss(weight=torch.ones(4).double())


def of_all_samples(output, y):
    return (output.sum(dim=1) - y).abs().mean()


def both(*rows):
    """Rows of two functions that split the samples."""
    names = ("representativeness", "generalization_bound")
    return [(name, *row) for name in names for row in rows]


VALUES = [
    ("feature_robustness", {"delta": 0.0}, "delta must be a finite positive number, got 0.0"),
    ("feature_robustness", {"delta": float("nan")}, "delta must be .* got nan"),
    ("feature_robustness", {"delta": "much"}, "delta must be .* got 'much'"),
    ("feature_robustness", {"matrices": "haar"}, "one of .*'orthogonal'.* got 'haar'"),
    ("feature_robustness", {"matrices": np.eye(5)}, r"shape \(6, 6\) or \(k, 6, 6\).* got \(5, 5"),
    ("feature_robustness", {"matrices": np.zeros((0, 6, 6))}, r"got \(0, 6, 6\)"),
    ("feature_robustness", {"matrices": np.ones(6)}, r"matrices must have shape .* got \(6,\)"),
    ("feature_robustness", {"n_draws": 1}, "n_draws must be an integer of at least 2, got 1"),
    ("feature_robustness", {"n_draws": 2.5}, "n_draws must be an integer of at least 2, got 2.5"),
    ("feature_robustness", {"criterion": None}, "criterion is needed"),
    ("feature_robustness", {"random_state": "x"}, "random_state must be .* got 'x'"),
    (
        "feature_robustness",
        {"matrices": "truncated_normal", "absolute": True},
        "absolute=True needs matrices that all samples share",
    ),
    (
        "feature_robustness",
        {"labelling": lambda phi: phi},
        r"must have the shape of the labels, \(40,\), got \(40, 6\)",
    ),
    ("worst_feature_robustness", {"n_steps": 0}, "n_steps must be a positive integer, got 0"),
    ("worst_feature_robustness", {"n_restarts": -1}, "n_restarts must be .*, got -1"),
    ("worst_feature_robustness", {"delta": 0}, "delta must be a finite positive number, got 0"),
    ("worst_feature_robustness", {"matrices": np.eye(7)}, r"have shape \(6, 6\) or \(k, 6"),
    *both(
        ({"delta": -1}, "delta must be a finite positive number, got -1"),
        ({"n_splits": 1}, "n_splits must be an integer of at least 2, got 1"),
        ({"n_splits": "5"}, "n_splits must be .* got '5'"),
        ({"test_size": 1.5}, "test_size=1.5 should be"),
        ({"n_draws": 1}, "n_draws must be an integer of at least 2, got 1"),
        ({"random_state": "x"}, "random_state must be an int, .* got 'x'"),
        ({"criterion": of_all_samples}, r"losses of shape \(\) for 40 samples"),
        (
            {"smoothing": Smoothing(bandwidth=0.1), "delta": 0.1},
            "bandwidth=0.1 is the same for all samples, and delta=0.1 in",
        ),
        (
            {"smoothing": Smoothing(alphas=[1.0])},
            r"alphas must be 40 numbers, .* got an array of shape \(1,\)",
        ),
        ({"smoothing": Smoothing(alphas=np.zeros(40))}, "alphas must be 40"),
        ({"smoothing": Smoothing(alphas=-np.ones(40))}, "alphas must be 40"),
        (
            {"smoothing": Smoothing(alphas=np.eye(40)[0])},
            "no sample of one part of a split counts: their alphas",
        ),
    ),
    ("Smoothing", {"kernel": "box"}, "kernel must be one of .*, got 'box'"),
    ("Smoothing", {"kernel": 3}, "kernel must be one of .*, got 3"),
    ("Smoothing", {"sigma": 0}, "sigma must be a finite positive number, got 0"),
    ("Smoothing", {"bandwidth": "best"}, "bandwidth must be .* number or None, got 'best'"),
    ("Smoothing", {"bandwidth": -1}, "bandwidth must be .* number or None, got -1"),
    (
        "Smoothing",
        {"bandwidth": 0.1, "kernel": "uniform"},
        "bandwidth=0.1 .*, but kernel='uniform' and sigma",
    ),
    (
        "Smoothing",
        {"bandwidth": 0.1, "sigma": 2.0},
        "in place of a kernel, but .* and sigma=2.0 are",
    ),
    ("label_constancy", {"by": "size"}, 'by must be "labels" or "loss", got \'size\''),
    ("label_constancy", {"n_neighbors": 0}, "'n_neighbors' parameter of Near.* must be .* Got 0"),
    ("label_constancy", {"n_neighbors": 40}, "n_neighbors = 40, n_samples_fit = 40"),
    ("label_constancy", {"y": np.linspace(0, 1, 40)}, "y must hold classes, got continuous .* 0.0"),
    ("label_constancy", {"y": None}, "y is needed for the labels to compare"),
    ("sharpness_conditions", {"detail": "C2", "deltas": [0.1, 0]}, "deltas must be a .*, got 0"),
    ("sharpness_conditions", {"detail": "C4"}, 'detail must be None, "C1" or "C2", got \'C4\''),
    (
        "sharpness_conditions",
        {"detail": "C1", "initial": NET},
        "detail='C1' is about one module, but initial",
    ),
    ("sharpness_conditions", {"initial": NET[:3]}, r"initial module has the layers \['0', '2'\]"),
    ("sharpness_bound", {"delta": 1}, "delta must be a probability below 1, got 1"),
    ("sharpness_bound", {"sigma": 0}, "sigma must be a finite positive number, got 0"),
    ("sharpness_bound", {"sigma": [0.1, 0.1]}, "one for each of the 3 layers, got 2"),
    ("sharpness_bound", {"model": nn.Linear(5, 4).double()}, "needs a network of two layers"),
    ("sharpness_bound", {"lipschitz": -1}, "lipschitz must be a finite positive number or None"),
    (
        "sharpness_bound",
        {"criterion": WEIGHTED},
        "the Lipschitz constant of CrossEntropyLoss.* is not known: pass lipschitz=",
    ),
    # with larger slopes than the mean without weights
    *(
        (
            "sharpness_bound",
            {"criterion": nn.BCEWithLogitsLoss(**own).double(), "y": torch.ones(40, 4).double()},
            "constant of BCEWithLogitsLoss.* is not known",
        )
        for own in ({"pos_weight": torch.full((4,), 100.0)}, {"reduction": "sum"})
    ),
    ("pac_bayes_bound", {"initial": NET}, OWN),
    ("pac_bayes_bound", {"initial": NET.state_dict()}, OWN),
    ("pac_bayes_bound", FEW, "needs 8 labelled samples or more, "),
    ("pac_bayes_bound", SEQUENCES, "6 samples have 24 labels"),
    ("pac_bayes_bound", {"delta": 0}, "delta must be a finite positive number, got 0"),
    ("pac_bayes_bound", {"delta": 1.0}, "delta must be a probability below 1, got 1.0"),
    ("pac_bayes_bound", {"n_draws": 0}, "n_draws must be a positive integer, got 0"),
    ("pac_bayes_bound", {"sigmas": []}, "sigmas must hold at least one standard deviation"),
    ("pac_bayes_bound", {"sigmas": [0.1, -1]}, "sigmas must be a finite positive number, got -1"),
    (
        "pac_bayes_bound",
        {"initial": nn.Linear(2, 2)},
        r"do not fit the network: 0.weight, 0.bias, .* is missing",
    ),
    (
        "pac_bayes_bound",
        {"criterion": nn.MSELoss(), "y": torch.randn(40, 4)},
        "has no classes, and so no errors to count",
    ),
]
TYPES = [
    *both(
        ({"refit": True}, "refit=True needs an estimator .* got Sequential"),
        ({"smoothing": "scott"}, "must be a Smoothing or None, got str. Pass"),
    ),
    (
        "pac_bayes_bound",
        {"initial": LogisticRegression()},
        "initial must be a module or its state dict, got Logistic",
    ),
]
NEEDED = {
    "feature_robustness": {"delta": 0.1},
    "worst_feature_robustness": {"delta": 0.1},
    "representativeness": {"random_state": 0},
    "generalization_bound": {"random_state": 0},
    "sharpness_bound": {"sigma": 1},
}


@pytest.mark.parametrize(
    ("name", "arguments", "message", "error"),
    [
        *((*row, ValueError) for row in VALUES),
        *((*row, TypeError) for row in TYPES),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(name, arguments, message, error):
    if name == "sharpness_conditions":
        arguments = {"model": NET, "X": X, **arguments}
    elif name != "Smoothing":
        arguments = {"model": NET, "X": X, "y": Y, **CE, **NEEDED.get(name, {}), **arguments}
    with pytest.raises(error, match=message):
        getattr(theory, name)(**arguments)

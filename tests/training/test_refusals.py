"""What nets refuse to be trained on or with: one table of data, parameters, errors and texts."""

from functools import partial

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from scipy.sparse import csr_array
from sklearn.datasets import load_diabetes
from skorch.callbacks import Checkpoint, EarlyStopping, LRScheduler
from skorch.dataset import ValidSplit
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, default_collate

from relflat_sk import (
    FlatnessWarning,
    LayerNotFoundError,
    StopAtGradientNorm,
    StopAtLoss,
    relative_flatness,
)
from tests.training.common import (
    INDEX,
    NAMES,
    SIZES,
    VALUES,
    Binary,
    Classifier,
    Net,
    Regressor,
    Stream,
    X,
    dataset,
    make,
)


def spoilt(value):
    bad = X.copy()
    bad[3, 2] = value
    return bad


DIABETES = load_diabetes(return_X_y=True)
LOADER = DataLoader(dataset(INDEX), batch_size=30)
DATA = [
    (Classifier, torch.tensor(spoilt(np.nan)), NAMES, "NaN or infinity"),
    (Classifier, {"x": spoilt(np.nan)}, NAMES, "X contains NaN"),
    (Classifier, csr_array(spoilt(np.nan)), NAMES, "NaN"),
    (Classifier, X, NAMES[:-1], "X has 42 samples, y has 41 labels"),
    (Classifier, torch.tensor(X[:0]), NAMES[:0], "something to learn from"),
    (Classifier, torch.tensor(X[:, 0]), NAMES, r"X must have shape \(n_samples, n_features"),
    (Classifier, X, ["x"] * 42, r"at least two classes in y, got one class: \['x'\]"),
    (Classifier, X, None, "y is None"),
    (Classifier, X, np.where(INDEX == 0, np.nan, INDEX), "Input y contains NaN"),
    (Classifier, X, X[:, :2], "y should be a 1d array"),
    (Classifier, dataset(INDEX), None, "n_features and n_outputs"),
    (Binary, X, NAMES, "Only binary classification"),
    (Regressor, X, NAMES, "could not convert string to float"),
    # parameters of another task
    (partial(Binary, criterion=nn.CrossEntropyLoss), X, INDEX > 0, "CrossEntropyLoss"),
    (partial(Binary, module__n_outputs=2), X, INDEX > 0, r"takes 1 output.*\(16, 2\)"),
    (partial(Regressor, criterion=nn.BCEWithLogitsLoss), X, VALUES, "BCEWithLogitsLoss"),
    (partial(Regressor, module__n_outputs=1), X, X[:, :2], r"takes 2 output.*\(16, 1\)"),
    # numbers of a regression, as classes
    (Net, *DIABETES, "214 different values of float64 in 442 samples.*MSELoss.*astype"),
    (Classifier, *DIABETES, "214 different values .*Regressor.*astype"),
]


@pytest.mark.parametrize(("kind", "inputs", "y", "message"), DATA, ids=[row[-1] for row in DATA])
def test_data(kind, inputs, y, message):
    with pytest.raises(ValueError, match=message):
        kind(verbose=0, batch_size=16).fit(inputs, y)


OF_LAYER = [
    ({"flatness_layer": "nope"}, "no layer 'nope'. Layers with a weight"),
    ({"flatness_layer": 2}, "there is no layer 2"),
    ({"flatness_layer": "activation0"}, "is a ReLU, which has no weight"),
]
OF_TYPE = [
    ({"flatness_layer": None}, "layer must be an int"),
    ({"flatness_layer": nn.Linear(2, 2)}, "or a dotted name, got a module"),
    ({"optimizer": "adam"}, "optimizer must be a class, such as .*, got 'adam'"),
    ({"criterion": "cross_entropy"}, "criterion must be a class.* got 'cross_entropy'"),
    ({"criterion": nn.functional.cross_entropy}, "cross_entropy"),
    ({"criterion__weight": {0: 1.0, 1: 2.0}}, "dict"),
    ({"callbacks": StopAtLoss(0.1)}, "StopAtLoss"),
]
OF_VALUE = [
    ({"flatness_weight": np.nan}, "flatness_weight must be"),
    ({"flatness_warmup": -1}, "flatness_warmup must be"),
    ({"flatness_every": 0}, "flatness_every must be"),
    ({"flatness_start": 1.5}, "flatness_start=1.5 is a share of max_epochs"),
    ({"flatness_start": -1}, "flatness_start must be"),
    ({"flatness_probes": 0}, "flatness_probes must be"),
    ({"flatness_normalize": "x"}, "flatness_normalize must be"),
    ({"flatness_layer": []}, "at least one layer"),
    ({"module__n_outputs": 5}, r"y has .* takes 3 output.*\(16, 5\) for a batch"),
    ({"criterion": nn.MSELoss}, "MSELoss is a regression loss. Use Relative"),
    ({"criterion__weight": "balanced"}, "'balanced'"),
    ({"criterion__weight": [1.0, 2.0]}, r"weight has 2 .* classes \['x', 'y', 'z"),
    ({"callbacks": [StopAtLoss(0)]}, "loss must be"),
    ({"callbacks": [StopAtLoss(every=0)]}, "every must be"),
    ({"callbacks": [StopAtGradientNorm("0.1")]}, "tol must be"),
    ({"flatness_wieght": 1, "epochs": 3}, "in place of epochs, use max_epochs"),
    ({"class_weight": "balanced"}, "in place of class_weight, use criterion__weig"),
    ({"hidden_layer_sizes": 8, "max_iter": 5}, "sizes; in place of max_iter, use"),
    ({"early_stopping": True}, "use callbacks=.*EarlyStopping"),
    ({"iterator_train__collate_fn": default_collate}, "iterator_train__collate_fn"),
]
REFUSED = {LayerNotFoundError: OF_LAYER, TypeError: OF_TYPE, ValueError: OF_VALUE}


@pytest.mark.parametrize(
    ("error", "params", "message"),
    [(error, *row) for error, rows in REFUSED.items() for row in rows],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_parameters(error, params, message):
    net = Classifier(verbose=0, batch_size=16, **params)  # nothing happens before fit
    with pytest.raises(error, match=message):
        net.fit(X, NAMES, sample_weight=np.ones(42) if "iterator" in str(params) else None)


@pytest.mark.parametrize(
    ("data", "params", "weights", "message"),
    [
        (Stream(), {"train_split": ValidSplit(3)}, None, "train_split=.* but the Stream is read"),
        (Stream(), {}, np.ones(42), "sample_weight .* but the Stream is read"),
        (LOADER, {"train_split": ValidSplit(3)}, None, "train_split=.* but the DataLoader is read"),
        (dataset(INDEX + 1), {}, None, "y must hold class indices from 0 to 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_data_sets_and_loaders(data, params, weights, message):
    net = Classifier(verbose=0, **SIZES, **params)
    with pytest.raises(ValueError, match=message):
        net.fit(data, sample_weight=weights)
    assert not net.history or "train_loss" not in net.history[-1]


@pytest.mark.parametrize("kind", [np.asarray, torch.tensor, csr_array])
def test_predicting_and_measuring_check_the_data(kind):
    net = make().fit(X, NAMES)
    for call in (net.predict, lambda rows: relative_flatness(net, rows, NAMES)):
        with pytest.raises(ValueError, match="X has 3 features, but .* is expecting 4"):
            call(kind(X[:, :3]))
    with pytest.raises(ValueError, match="NaN"):
        net.predict(kind(spoilt(np.nan)))
    with pytest.raises(ValueError, match=r"not seen when the net was fitted: \['w'\]"):
        relative_flatness(net, kind(X), ["w"] * 42)


LETTERS = np.array(list("abcdefghijklmnopqrstu"))[np.arange(42) % 21]


@pytest.mark.parametrize("y", [INDEX.astype(float), np.arange(42.0) % 20, LETTERS])
def test_classes_of_any_type(y):
    assert_array_equal(make(Net).fit(X, y).classes_, np.unique(y))  # warnings are errors


def test_classes_that_are_named_are_classes_and_integers_of_few_samples_warn():
    inputs, y, classes = np.tile(X, (2, 1)), np.arange(84) % 30, np.arange(30.0)
    assert_array_equal(make(Net).partial_fit(inputs, y, classes).classes_, classes)
    with pytest.warns(FlatnessWarning, match="30 different values of int.*Regressor"):
        assert len(make().fit(inputs, y).classes_) == 30


@pytest.mark.parametrize(
    ("y", "ignored"),
    [
        (INDEX - 1, -1),  # -1 would be encoded as 0, and trained on
        (INDEX + 1, 0),  # 1 would be encoded as 0, and ignored
        (np.where(INDEX == 0, -100, INDEX), -100),  # torch's default
    ],
    ids=["unlabelled", "not in y", "default"],
)
def test_an_index_to_ignore_must_be_that_of_a_label(y, ignored):
    criterion = {} if ignored == -100 else {"criterion__ignore_index": ignored}
    with pytest.raises(ValueError, match=f"ignore_index={ignored}, but the labels .* 0 to 2: they"):
        make(**criterion).fit(X, y)


def test_an_index_to_ignore_among_classes_from_0_is_ignored_also_after_a_dataset():
    params = {"module": nn.Linear(4, 3), "batch_size": 42}
    net, expected = make(criterion__ignore_index=1, **params).fit(X, INDEX), make(**params)
    expected.fit(dataset(np.where(INDEX == 1, -100, INDEX)))
    assert_array_equal(net.predict_proba(X), expected.predict_proba(X))
    net.fit(dataset())
    with pytest.raises(ValueError, match="ignore_index=1"):
        net.partial_fit(X, NAMES)


class Ending(nn.Module):
    """A linear network that ends in a function."""

    def __init__(self, n_features, n_outputs, function):
        super().__init__()
        self.linear, self.function = nn.Linear(n_features, n_outputs), function

    def forward(self, x):
        return self.function(self.linear(x))


def ending(function, criterion, **settings):
    return make(Net, module=Ending, module__function=function, criterion=criterion, **settings)


WRONG = {  # name -> (what the module ends in, criterion, message)
    "softmax": (nn.Softmax(dim=-1), nn.CrossEntropyLoss, "in a softmax already.*nn.NLLLoss"),
    "other axes": (lambda z: z.T.softmax(dim=0).T, nn.CrossEntropyLoss, "in a softmax already"),
    "two sigmoids": (nn.Sigmoid(), nn.BCEWithLogitsLoss, "in a sigmoid already.*nn.BCELoss"),
    "log of a softmax": (nn.LogSoftmax(dim=1), nn.BCEWithLogitsLoss, "in a log_softmax already"),
    "logarithms": (nn.LogSoftmax(dim=1), nn.NLLLoss, "NLLLoss takes probab.*values from -"),
    "logits": (lambda z: z.abs() / 100, nn.NLLLoss, "with the sum 1"),
}


@pytest.mark.parametrize("weight", [0, 0.1])
@pytest.mark.parametrize("name", WRONG)
def test_a_criterion_that_does_not_fit_the_module(name, weight):
    function, criterion, message = WRONG[name]
    net = ending(function, criterion, flatness_weight=weight)
    binary = criterion is nn.BCEWithLogitsLoss
    with pytest.raises(ValueError, match=message):
        net.fit(X, INDEX > 0 if binary else INDEX)
    assert not net.history[-1]["batches"][-1].get("train_loss")  # before the first step


@pytest.mark.parametrize(
    ("function", "criterion", "usual"),
    [
        (nn.Softmax(dim=-1), nn.NLLLoss, nn.CrossEntropyLoss),
        (nn.LogSoftmax(dim=-1), nn.CrossEntropyLoss, nn.CrossEntropyLoss),
        (nn.Sigmoid(), nn.BCELoss, nn.BCEWithLogitsLoss),
    ],
    ids=["as in skorch", "log softmax", "sigmoid"],
)
def test_a_criterion_that_fits_the_module(function, criterion, usual):
    y = INDEX > 0 if usual is nn.BCEWithLogitsLoss else INDEX
    found, logits = (
        ending(*pair).fit(X, y) for pair in [(function, criterion), (nn.Identity(), usual)]
    )
    np.testing.assert_allclose(found.predict_proba(X), logits.predict_proba(X), atol=1e-3)
    assert found.relative_flatness_ == pytest.approx(logits.relative_flatness_, rel=1e-2)


def test_a_function_of_the_users_own_is_left_alone():
    class Sharpened(nn.CrossEntropyLoss):
        def forward(self, input, target):
            return super().forward(10 * input, target)

    net = ending(nn.Softmax(dim=1), Sharpened, module__n_outputs=3)
    assert len(net.fit(X, torch.from_numpy(INDEX)).history) == 3


VALIDATED = {
    "EarlyStopping": lambda folder: EarlyStopping(),
    "accuracy": lambda folder: EarlyStopping("valid_acc", lower_is_better=False),
    "Checkpoint": lambda folder: Checkpoint(dirname=folder),
    "LRScheduler": lambda folder: LRScheduler(ReduceLROnPlateau, monitor="valid_loss"),
}


@pytest.mark.parametrize("name", VALIDATED)
def test_callbacks_that_need_validation_data(name, tmp_path):
    callback = VALIDATED[name](tmp_path)
    net = make(callbacks=[callback])
    kind = type(callback).__name__
    with pytest.raises(ValueError, match=f"{kind} reads 'valid_.*train_split=.*ValidSplit"):
        net.fit(X, INDEX)
    assert not net.history  # before any training
    net.set_params(train_split=ValidSplit(5), callbacks=[VALIDATED[name](tmp_path)])
    assert len(net.fit(X, INDEX).history) == 3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("name", "y", "given"),
    [
        ("weight", INDEX, [1.0, 2.0, 0.5]),
        ("pos_weight", INDEX > 0, 3),
        ("pos_weight", INDEX > 0, np.array([3.0])),
    ],
    ids=["list", "number", "array"],
)
def test_weights_of_classes_may_be_arrays_and_are_of_the_dtype_of_the_data(name, y, given, dtype):
    inputs, tensor = X.astype(dtype), torch.tensor(np.atleast_1d(given)).float()
    params = {"callbacks": [StopAtLoss(10.0)]}  # which evaluates the criterion
    params["criterion"] = nn.CrossEntropyLoss if name == "weight" else nn.BCEWithLogitsLoss
    expected, net = (
        make(Net, **params, **{f"criterion__{name}": weights}).fit(inputs, y)
        for weights in (tensor, given)
    )
    assert getattr(net.criterion_, name).dtype == next(net.module_.parameters()).dtype
    assert tensor.dtype == torch.float32  # the user's own stays as it is
    assert_array_equal(net.predict_proba(inputs), expected.predict_proba(inputs))

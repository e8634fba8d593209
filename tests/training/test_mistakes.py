"""What cannot be meant is refused before training, with an error that says what to do."""

import warnings

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from sklearn.datasets import load_diabetes
from skorch.callbacks import Checkpoint, EarlyStopping, LRScheduler
from skorch.dataset import ValidSplit
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from relflat_sk import (
    FlatnessWarning,
    FleetTrainer,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedNet,
    relative_flatness,
)

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 4)).astype(np.float32)
Y = np.arange(60) % 3
SETTINGS = {"max_epochs": 2, "verbose": 0, "random_state": 0}
DIABETES = load_diabetes(return_X_y=True)


# -- numbers that are no classes ---------------------------------------------------------


@pytest.mark.parametrize("factory", [
    RelativeFlatnessRegularizedNet, RelativeFlatnessRegularizedClassifier,
])  # fmt: skip
@pytest.mark.parametrize(
    ("X", "y", "found"),
    [
        (*DIABETES, "214 different values of float64 in 442 samples"),
        (X, np.arange(60.0) % 21, "21 different values of float64 in 60 samples"),
        (X[:9], np.arange(9.0) % 5, "5 different values of float64 in 9 samples"),
        (X, torch.arange(60.0) % 30, "30 different values of float32 in 60 samples"),
    ],
    ids=["diabetes", "many values", "few samples", "tensor"],
)
def test_numbers_of_a_regression_are_no_classes(factory, X, y, found):
    instead = "use RelativeFlatnessRegularizedRegressor" if factory._fixed_task else ".*MSELoss"
    match = f"y has {found}, which look like .* If they are, {instead}.*astype"
    with pytest.raises(ValueError, match=match):
        factory(**SETTINGS).fit(X, y)


@pytest.mark.parametrize("y", [
    Y.astype(float), (Y > 0).astype(float), np.arange(60.0) % 20, np.arange(60) % 12,
    np.array(list("abcdefghijklmnopqrstuvwxyz"))[np.arange(60) % 26],
], ids=["three", "two", "twenty", "integers", "letters"])  # fmt: skip
def test_classes_of_any_type(y):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FlatnessWarning)
        net = RelativeFlatnessRegularizedNet(**SETTINGS).fit(X, y)
    assert_array_equal(net.classes_, np.unique(y))


def test_named_classes_are_classes():
    classes = np.arange(30.0)
    net = RelativeFlatnessRegularizedNet(**SETTINGS).partial_fit(X, np.arange(60) % 30, classes)
    assert_array_equal(net.classes_, classes)


# -- labels to ignore --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("y", "ignored"),
    [
        (Y - 1, -1),  # -1 would be encoded as 0, and trained on
        (Y + 1, 0),  # 1 would be encoded as 0, and ignored
        (np.array(list("abc"))[Y], 2),
        (np.where(Y == 0, -100, Y), -100),  # torch's default
    ],
    ids=["unlabelled", "not in y", "letters", "default"],
)
def test_an_index_to_ignore_must_be_that_of_a_label(y, ignored):
    criterion = {} if ignored == -100 else {"criterion__ignore_index": ignored}
    net = RelativeFlatnessRegularizedClassifier(**SETTINGS, **criterion)
    with pytest.raises(ValueError, match=f"ignore_index={ignored}, but the labels .* 0 to 2: they"):
        net.fit(X, y)


def test_an_index_to_ignore_is_checked_when_labels_follow_a_dataset():
    settings = {**SETTINGS, "module": torch.nn.Linear(4, 3), "criterion__ignore_index": 1}
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    net = RelativeFlatnessRegularizedClassifier(**settings).fit(data)
    with pytest.raises(ValueError, match=r"ignore_index=1, but the labels .* 0 to 2: they"):
        net.partial_fit(X, np.array(list("abc"))[Y])
    assert_array_equal(net.partial_fit(X, Y).classes_, [0, 1, 2])


def test_an_index_to_ignore_among_classes_from_0_is_ignored():
    settings = {**SETTINGS, "module": torch.nn.Linear(4, 3), "batch_size": 60}
    net = RelativeFlatnessRegularizedClassifier(**settings, criterion__ignore_index=1).fit(X, Y)
    encoded = np.where(Y == 1, -100, Y)
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(encoded))
    expected = RelativeFlatnessRegularizedClassifier(**settings).fit(data)
    assert_array_equal(net.predict_proba(X), expected.predict_proba(X))


@pytest.mark.parametrize(
    ("factory", "instead"),
    [
        (RelativeFlatnessRegularizedNet, "pass a regression loss, such as .*MSELoss"),
        (RelativeFlatnessRegularizedClassifier, "use RelativeFlatnessRegularizedRegressor"),
    ],
)
def test_integers_with_few_samples_of_each_warn(factory, instead):
    net = factory(**SETTINGS)
    match = f"integers of more than 20 .*taken for classes.*, {instead}"
    with pytest.warns(FlatnessWarning, match=match):
        net.fit(X, np.arange(60) % 30)
    assert len(net.classes_) == 30


def test_diabetes_as_a_regression():
    net = RelativeFlatnessRegularizedNet(criterion=nn.MSELoss, lr=0.01, **SETTINGS).fit(*DIABETES)
    assert net.predict(DIABETES[0]).shape == (442,)


# -- probabilities where logits belong ------------------------------------------------------


class Ending(nn.Module):
    """A linear network that ends in a function."""

    def __init__(self, n_features, n_outputs, function):
        super().__init__()
        self.linear, self.function = nn.Linear(n_features, n_outputs), function

    def forward(self, x):
        return self.function(self.linear(x))


def ending(function, criterion, **settings):
    return RelativeFlatnessRegularizedNet(
        Ending, module__function=function, criterion=criterion, **(SETTINGS | settings)
    )


WRONG = {  # name -> (what the module ends in, criterion, message)
    "softmax": (
        nn.Softmax(dim=-1), nn.CrossEntropyLoss, "in a softmax already. Remove .*nn.NLLLoss",
    ),
    "softmax, other axes": (
        lambda z: z.T.softmax(dim=0).T, nn.CrossEntropyLoss, "in a softmax already.",
    ),
    "sigmoid": (nn.Sigmoid(), nn.CrossEntropyLoss, "in a sigmoid already. Remove .*nn.BCELoss"),
    "two sigmoids": (nn.Sigmoid(), nn.BCEWithLogitsLoss, "in a sigmoid already. .*nn.BCELoss"),
    "log of a softmax": (
        nn.LogSoftmax(dim=1), nn.BCEWithLogitsLoss, "in a log_softmax already. .*CrossEntropyLoss",
    ),
    "logarithms": (nn.LogSoftmax(dim=1), nn.NLLLoss, "NLLLoss takes probab.*values from -"),
    "logits": (lambda z: z.abs() / 100, nn.NLLLoss, "with the sum 1 .*values from "),
    "large logits": (lambda z: z.square() + 2, nn.BCELoss, "BCELoss takes probab.*values from 2"),
}  # fmt: skip


@pytest.mark.parametrize("weight", [0, 0.1])
@pytest.mark.parametrize("name", WRONG)
def test_a_criterion_that_does_not_fit_the_module(name, weight):
    function, criterion, message = WRONG[name]
    net = ending(function, criterion, flatness_weight=weight)
    binary = criterion in {nn.BCELoss, nn.BCEWithLogitsLoss}
    with pytest.raises(ValueError, match=message):
        net.fit(X, Y > 0 if binary else Y)
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
    y = Y > 0 if usual is nn.BCEWithLogitsLoss else Y
    found, logits = (
        ending(*pair).fit(X, y) for pair in [(function, criterion), (nn.Identity(), usual)]
    )
    np.testing.assert_allclose(found.predict_proba(X), logits.predict_proba(X), atol=1e-3)


def test_a_function_of_the_users_own_is_left_alone():
    class Sharpened(nn.CrossEntropyLoss):
        def forward(self, input, target):
            return super().forward(10 * input, target)

    net = ending(nn.Softmax(dim=1), Sharpened, module__n_outputs=3)
    assert len(net.fit(X, torch.from_numpy(Y)).history) == 2


def test_a_fleet_refuses_the_same():
    nets = [ending(nn.Softmax(dim=-1), nn.CrossEntropyLoss, flatness_weight=0, random_state=seed)
            for seed in range(2)]  # fmt: skip
    with pytest.raises(ValueError, match="in a softmax already"):
        FleetTrainer(nets, fleet=2).fit(X, Y)


@pytest.mark.parametrize(
    ("function", "criterion", "instead"),
    [
        (nn.Softmax(dim=1), nn.CrossEntropyLoss(), "softmax .*, such as criterion=lambda p, y"),
        (nn.Sigmoid(), nn.BCEWithLogitsLoss(), "sigmoid .*, such as criterion=torch.nn.BCELoss"),
    ],
    ids=["softmax", "sigmoid"],
)
def test_measures_warn_of_such_a_criterion(function, criterion, instead):
    torch.manual_seed(0)
    module = Ending(4, 3, function)
    y = torch.from_numpy(Y) if function.__class__ is nn.Softmax else torch.rand(60, 3)
    match = (
        f"takes logits, .* already. So the loss is not.*trained with this.* remove the {instead}"
    )
    with pytest.warns(FlatnessWarning, match=match):
        relative_flatness(module, X, y, criterion=criterion)


# -- callbacks without validation data --------------------------------------------------------


def callbacks_of_validation(folder):
    return {
        "EarlyStopping": EarlyStopping(),
        "accuracy": EarlyStopping("valid_acc", lower_is_better=False),
        "Checkpoint": Checkpoint(dirname=folder),
        "LRScheduler": LRScheduler(ReduceLROnPlateau, monitor="valid_loss"),
    }


@pytest.mark.parametrize("name", callbacks_of_validation(None))
def test_callbacks_that_need_validation_data(name, tmp_path):
    callback = callbacks_of_validation(tmp_path)[name]
    net = RelativeFlatnessRegularizedClassifier(callbacks=[callback], **SETTINGS)
    kind = type(callback).__name__
    with pytest.raises(ValueError, match=f"{kind} reads 'valid_.*train_split=.*ValidSplit"):
        net.fit(X, Y)
    assert not net.history  # before any training
    net.set_params(train_split=ValidSplit(5), callbacks=[callbacks_of_validation(tmp_path)[name]])
    assert len(net.fit(X, Y).history) == 2


@pytest.mark.parametrize("monitor", ["train_loss", "flatness_penalty"])
def test_callbacks_of_the_training_data(monitor):
    net = RelativeFlatnessRegularizedClassifier(callbacks=[EarlyStopping(monitor)], **SETTINGS)
    assert len(net.fit(X, Y).history) == 2


# -- names and kinds of scikit-learn ----------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"class_weight": "balanced"}, "in place of class_weight, use criterion__weight"),
        ({"hidden_layer_sizes": 8, "max_iter": 5}, "hidden_layer_sizes; in place of max_iter, use"),
        ({"alpha": 1e-4}, "use optimizer__weight_decay"),
        ({"early_stopping": True}, "use callbacks=.*EarlyStopping.* with train_split="),
        ({"epochs": 5}, "in place of epochs, use max_epochs"),
    ],
    ids=["class_weight", "two", "alpha", "early_stopping", "epochs"],
)
def test_names_of_other_networks_come_with_those_of_this_library(given, instead):
    net = RelativeFlatnessRegularizedClassifier(**SETTINGS, **given)
    with pytest.raises(ValueError, match=rf"(?s)unexpected argument.*relflat_sk, .*{instead}"):
        net.fit(X, Y)


def test_a_misspelt_parameter_comes_with_the_one_that_was_meant():
    given = {"flatness_wieght": 1, "module__activation": "tanh", "epochs": 3}
    net = RelativeFlatnessRegularizedClassifier(**SETTINGS, **given)
    with pytest.raises(ValueError, match="subclass.* Did you mean 'flatness_weight'") as caught:
        net.fit(X, Y)
    assert str(caught.value).count("Did you mean") == 1


@pytest.mark.parametrize("kind", [np.array, list, np.float32], ids=["array", "list", "float32"])
def test_weights_of_classes_may_be_arrays(kind):
    weights = [1.0, 2.0, 0.5]
    expected, net = (
        RelativeFlatnessRegularizedClassifier(criterion__weight=given, **SETTINGS).fit(X, Y)
        for given in (torch.tensor(weights), kind(weights))
    )
    assert net.criterion_.weight.dtype == torch.float32
    assert_array_equal(net.predict_proba(X), expected.predict_proba(X))


@pytest.mark.parametrize("weight", [3, np.array([3.0])], ids=["number", "array"])
def test_the_weight_of_the_positive_class_may_be_a_number(weight):
    settings = {"criterion": nn.BCEWithLogitsLoss, **SETTINGS}
    expected, net = (
        RelativeFlatnessRegularizedNet(criterion__pos_weight=given, **settings).fit(X, Y > 0)
        for given in (torch.tensor([3.0]), weight)
    )
    assert_array_equal(net.predict_proba(X), expected.predict_proba(X))


def test_the_arguments_of_a_criterion_of_the_users_own_stay_as_they_are():
    class Own(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, output, target):
            return nn.functional.cross_entropy(output, target, torch.tensor(self.weight))

    weights = np.float32([1.0, 2.0, 0.5])
    net = RelativeFlatnessRegularizedNet(
        criterion=Own, criterion__weight=weights, module=nn.Linear(4, 3), **SETTINGS
    )
    assert net.initialize().criterion_.weight is weights

"""What nets refuse to be trained on or with: one table of texts, data and parameters."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from scipy.sparse import csr_array
from sklearn.datasets import load_diabetes
from skorch.callbacks import Checkpoint, EarlyStopping, LRScheduler
from skorch.dataset import Dataset, ValidSplit
from skorch.helper import predefined_split
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, default_collate

from relflat_sk import (
    FlatnessWarning,
    LayerNotFoundError,
    StopAtGradientNorm,
    StopAtLoss,
    WeightAverage,
    relative_flatness,
)
from tests.training.common import (
    INDEX,
    NAMES,
    SIZES,
    VALUES,
    Binary,
    Classifier,
    Ending,
    Net,
    Regressor,
    Sam,
    Stream,
    X,
    criterion_of,
    dataset,
    make,
)
from tests.training.test_outputs import Module, as_dict, as_scores


def spoilt(value):
    bad = X.copy()
    bad[3, 2] = value
    return bad


def row(message, *data, error=ValueError, kind=Classifier, weights=None, **params):
    """The arguments of the test below; nothing happens before fit."""
    net = kind(**{"verbose": 0, "batch_size": 16, **params})
    return pytest.param(error, message, net, data or (X, NAMES), weights, id=message)


def wrong(message, function, criterion, y=INDEX):
    params = {"kind": Net, "module": Ending, "module__function": function, "criterion": criterion}
    return [row(message, X, y, **params, flatness_weight=weight) for weight in (0, 0.1)]


CE, BCE = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss
DIABETES = load_diabetes(return_X_y=True)
MISSING = torch.tensor(spoilt(np.nan))
LOADER = DataLoader(dataset(INDEX), batch_size=30)
ONE_HOT, ONES = np.eye(3, dtype=int)[INDEX], np.ones(42)
LINEAR = nn.Linear(4, 3)
IGNORED = "ignore_index={}, but the labels .* 0 to 2: they"
VALIDATED = "{} reads 'valid_.*train_split=.*ValidSplit"
ON_PLATEAU = LRScheduler(ReduceLROnPlateau, monitor="valid_loss")
WRAPPED = {"module": Module, "flatness_weight": 0}
BOTH_PARTS = criterion_of(lambda z, y: F.cross_entropy(z["logits"] + z["hidden"].sum(), y))
OF_SCORES = criterion_of(lambda z, y: F.cross_entropy(z["scores"], y))
MISSPELT = criterion_of(lambda z, y: z["logit"].mean())

REFUSED = [
    # data
    row("NaN or infinity", MISSING, NAMES),
    row("X contains NaN", {"x": spoilt(np.nan)}, NAMES),
    row("NaN", csr_array(spoilt(np.nan)), NAMES),
    row("X has 42 samples, y has 41 labels", X, NAMES[:-1]),
    row("something to learn from", torch.tensor(X[:0]), NAMES[:0]),
    row(r"X must have shape \(n_samples, n_features", torch.tensor(X[:, 0]), NAMES),
    row(r"at least two classes in y, got one class: \['x'\]", X, ["x"] * 42),
    row("y is None", X, None),
    row("Input y contains NaN", X, np.where(INDEX == 0, np.nan, INDEX)),
    row("y should be a 1d array", X, X[:, :2]),
    row("y should be a 1d array", X, ONE_HOT),
    row("needs targets of shape", X, ONE_HOT, module=LINEAR),
    row("y should be a 1d array", X, ONE_HOT + 0.5, module=LINEAR),
    row("1d array|needs targets of shape", X, ONE_HOT.astype(str), module=LINEAR),
    row("30 labels", X.reshape(42, 1, 2, 2), ONE_HOT[:30, :2, None], module=nn.Conv2d(1, 2, 1)),
    row("n_features and n_outputs", dataset(INDEX), None),
    row("Only binary classification", X, NAMES, kind=Binary),
    row("could not convert string to float", X, NAMES, kind=Regressor),
    # data sets and loaders
    row("train_split=.* but the Stream is read", Stream(), **SIZES, train_split=ValidSplit(3)),
    row("sample_weight .* but the Stream is read", Stream(), **SIZES, weights=ONES),
    row("train_split=.* but the DataLoader is read", LOADER, **SIZES, train_split=ValidSplit(3)),
    row("y must hold class indices from 0 to 2", dataset(INDEX + 1), **SIZES),
    # parameters of another task
    row("CrossEntropyLoss", X, INDEX > 0, kind=Binary, criterion=nn.CrossEntropyLoss),
    row(r"takes 1 output.*\(16, 2\)", X, INDEX > 0, kind=Binary, module__n_outputs=2),
    row("BCEWithLogitsLoss", X, VALUES, kind=Regressor, criterion=nn.BCEWithLogitsLoss),
    row(r"takes 2 output.*\(16, 1\)", X, X[:, :2], kind=Regressor, module__n_outputs=1),
    row(r"y has .* takes 3 output.*\(16, 5\) for a batch", module__n_outputs=5),
    row("MSELoss is a regression loss. Use Relative", criterion=nn.MSELoss),
    # numbers of a regression, as classes
    row("214 different values of float64 in 442 samples.*MSELoss.*astype", *DIABETES, kind=Net),
    row("214 different values .*Regressor.*astype", *DIABETES),
    # parameters of the penalty
    row("flatness_weight must be", flatness_weight=np.nan),
    row("flatness_warmup must be", flatness_warmup=-1),
    row("random_state must be an int, .* got 0.5", random_state=0.5),
    row("flatness_every must be", flatness_every=0),
    row("flatness_start=1.5 is a share of max_epochs", flatness_start=1.5),
    row("flatness_start must be", flatness_start=-1),
    row("flatness_probes must be", flatness_probes=0),
    row("flatness_normalize must be", flatness_normalize="x"),
    row("at least one layer", flatness_layer=[]),
    *(
        row(f"{name} must be a finite number of at least 0, got", kind=Sam, **{name: value})
        for name in ("sharpness_radius", "sharpness_eta")
        for value in (-1.0, None)
    ),
    # parameters of parts
    row("not seen", classes=["x", "y"]),
    row("different labels", classes=["x", "x", "y"]),
    row("'balanced'", criterion__weight="balanced"),
    row(r"weight has 2 .* classes \['x', 'y', 'z", criterion__weight=[1.0, 2.0]),
    row("loss must be", callbacks=[StopAtLoss(0)]),
    row("every must be", callbacks=[StopAtLoss(every=0)]),
    row("tol must be", callbacks=[StopAtGradientNorm("0.1")]),
    row("start", callbacks=[WeightAverage(start=1.5)]),
    row("start", callbacks=[WeightAverage(start="1")]),
    row("decay", callbacks=[WeightAverage(decay=1.0)]),
    row("in place of epochs, use max_epochs", flatness_wieght=1, epochs=3),
    row("in place of class_weight, use criterion__weig", class_weight="balanced"),
    row("sizes; in place of max_iter, use", hidden_layer_sizes=8, max_iter=5),
    row("use callbacks=.*EarlyStopping", early_stopping=True),
    row("iterator_train__collate_fn", weights=ONES, iterator_train__collate_fn=default_collate),
    row("n_features=0", module__n_features=0),
    row("n_outputs=1.5", module__n_outputs=1.5),
    row(r"hidden_layer_sizes=\(3, 0\)", module__hidden_layer_sizes=(3, 0)),
    row("activation must be .*got 'rely'", module__activation="rely"),
    row("init must be .*got 'zero'", module__init="zero"),
    # labels to ignore: -1 would be encoded as 0, and trained on; 1 as 0, and ignored
    row(IGNORED.format(-1), X, INDEX - 1, criterion__ignore_index=-1),
    row(IGNORED.format(0), X, INDEX + 1, criterion__ignore_index=0),
    row(IGNORED.format(-100), X, np.where(INDEX == 0, -100, INDEX)),
    # callbacks that need validation data
    row(VALIDATED.format("EarlyStopping"), callbacks=[EarlyStopping()]),
    row(VALIDATED.format("EarlyStopping"), callbacks=[EarlyStopping("valid_acc")]),
    row(VALIDATED.format("Checkpoint"), callbacks=[Checkpoint()]),
    row(VALIDATED.format("LRScheduler"), callbacks=[ON_PLATEAU]),
    # criteria that do not fit the module, with and without a penalty
    *wrong("in a softmax already.*nn.NLLLoss", nn.Softmax(dim=-1), CE),
    *wrong("in a softmax already", lambda z: z.T.softmax(dim=0).T, CE),
    *wrong("in a sigmoid already.*nn.BCELoss", nn.Sigmoid(), BCE, INDEX > 0),
    *wrong("in a log_softmax already", nn.LogSoftmax(dim=1), BCE, INDEX > 0),
    *wrong("NLLLoss takes probab.*values from -", nn.LogSoftmax(dim=1), nn.NLLLoss),
    *wrong("with the sum 1", lambda z: z.abs() / 100, nn.NLLLoss),
    # outputs that cannot be read
    row("whole output", **WRAPPED, module__wrap=as_dict, criterion=BOTH_PARTS),
    row("whole output", **WRAPPED, module__wrap=as_scores, criterion=OF_SCORES),
    row("KeyError: 'logit'", **WRAPPED, module__wrap=as_dict, criterion=MISSPELT),
    # types
    row("layer must be an int", flatness_layer=None, error=TypeError),
    row("or a dotted name, got a module", flatness_layer=nn.Linear(2, 2), error=TypeError),
    row("optimizer must be a class, such as .*, got 'adam'", optimizer="adam", error=TypeError),
    row("criterion must be .* got 'cross_entropy'", criterion="cross_entropy", error=TypeError),
    row("cross_entropy", criterion=F.cross_entropy, error=TypeError),
    row("dict", criterion__weight={0: 1.0, 1: 2.0}, error=TypeError),
    row("StopAtLoss", callbacks=StopAtLoss(0.1), error=TypeError),
    row("'logits', got dict", **WRAPPED, module__wrap=as_scores, error=TypeError),
    # layers
    row("no layer 'nope'. Layers with a weight", flatness_layer="nope", error=LayerNotFoundError),
    row("there is no layer 2", flatness_layer=2, error=LayerNotFoundError),
    row("is a ReLU, which has no weight", flatness_layer="activation0", error=LayerNotFoundError),
]


@pytest.mark.parametrize(("error", "message", "net", "data", "weights"), REFUSED)
def test_fit_refuses(error, message, net, data, weights):
    with pytest.raises(error, match=message):
        net.fit(*data, sample_weight=weights)
    batches = net.history[-1]["batches"] if net.history else []
    assert not any("train_loss" in batch for batch in batches)  # before the first step


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


def test_what_a_data_set_shows_is_refused_when_it_is_seen():
    net = make(classes=["x", "y"], **SIZES)
    with pytest.raises(ValueError, match="3 outputs"):
        net.fit(dataset())
    assert len(net.history) == 1  # in the first batch
    held_out = predefined_split(Dataset(X, NAMES))
    message = r"labels of a batch are no numbers, got .*'[xyz]'.* classes_"
    with pytest.raises(TypeError, match=message):
        make(train_split=held_out).fit(X, NAMES)


def test_a_nonlinearity_is_a_function():
    with pytest.raises(TypeError, match="predict_nonlinearity"):
        make(predict_nonlinearity="softmax").fit(X, NAMES).predict(X)


LETTERS = np.array(list("abcdefghijklmnopqrstu"))[np.arange(42) % 21]


@pytest.mark.parametrize("y", [INDEX.astype(float), np.arange(42.0) % 20, LETTERS])
def test_classes_of_any_type(y):
    assert_array_equal(make(Net).fit(X, y).classes_, np.unique(y))  # warnings are errors


def test_classes_that_are_named_are_classes_and_integers_of_few_samples_warn():
    inputs, y, classes = np.tile(X, (2, 1)), np.arange(84) % 30, np.arange(30.0)
    assert_array_equal(make(Net).partial_fit(inputs, y, classes).classes_, classes)
    with pytest.warns(FlatnessWarning, match="30 different values of int.*Regressor"):
        assert len(make().fit(inputs, y).classes_) == 30


def test_an_index_to_ignore_among_classes_from_0_is_ignored_also_after_a_dataset():
    params = {"module": nn.Linear(4, 3), "batch_size": 42}
    net, expected = make(criterion__ignore_index=1, **params).fit(X, INDEX), make(**params)
    expected.fit(dataset(np.where(INDEX == 1, -100, INDEX)))
    assert_array_equal(net.predict_proba(X), expected.predict_proba(X))
    net.fit(dataset())
    with pytest.raises(ValueError, match="ignore_index=1"):
        net.partial_fit(X, NAMES)


def ending(function, criterion, **settings):
    return make(Net, module=Ending, module__function=function, criterion=criterion, **settings)


@pytest.mark.parametrize(
    ("function", "criterion", "usual"),
    [
        (nn.Softmax(dim=-1), nn.NLLLoss, nn.CrossEntropyLoss),  # as in skorch
        (nn.LogSoftmax(dim=-1), nn.CrossEntropyLoss, nn.CrossEntropyLoss),
        (nn.Sigmoid(), nn.BCELoss, nn.BCEWithLogitsLoss),
    ],
)
def test_a_criterion_that_fits_the_module(function, criterion, usual):
    y = INDEX > 0 if usual is nn.BCEWithLogitsLoss else INDEX
    net, logits = ending(function, criterion).fit(X, y), ending(nn.Identity(), usual).fit(X, y)
    np.testing.assert_allclose(net.predict_proba(X), logits.predict_proba(X), atol=1e-3)
    assert net.relative_flatness_ == pytest.approx(logits.relative_flatness_, rel=1e-2)


def test_a_function_of_the_users_own_is_left_alone():
    class Sharpened(nn.CrossEntropyLoss):
        def forward(self, input, target):
            return super().forward(10 * input, target)

    net = ending(nn.Softmax(dim=1), Sharpened, module__n_outputs=3)
    assert len(net.fit(X, torch.from_numpy(INDEX)).history) == 3


def test_callbacks_that_need_validation_data_work_with_it(tmp_path):
    callbacks = EarlyStopping("valid_acc", lower_is_better=False), Checkpoint(dirname=tmp_path)
    net = make(callbacks=[*callbacks, ON_PLATEAU], train_split=ValidSplit(5))
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
    each = ({f"criterion__{name}": weights} for weights in (tensor, given))
    expected, net = (make(Net, **params, **weights).fit(inputs, y) for weights in each)
    assert getattr(net.criterion_, name).dtype == next(net.module_.parameters()).dtype
    assert tensor.dtype == torch.float32  # the user's own stays as it is
    assert_array_equal(net.predict_proba(inputs), expected.predict_proba(inputs))

"""What nets make of outputs: tensors, tuples, mappings; probabilities, logarithms, classes."""

import copy
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import log_expit, log_softmax
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from skorch.dataset import ValidSplit
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from relflat_sk import FlatnessWarning, FleetTrainer, relative_flatness
from tests.rounding import FLOAT32, rounding
from tests.training.common import (
    INDEX,
    LABELS,
    NAMES,
    SIZES,
    TASKS,
    Binary,
    Classifier,
    Ending,
    Net,
    Regressor,
    Stream,
    X,
    criterion_of,
    dataset,
    make,
    results_of,
)


class ModelOutput(OrderedDict):
    """A mapping with attributes, as in the package transformers."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Cache:
    """Something that is no tensor, as the cache of keys and values of a language model."""


class Module(nn.Module):
    def __init__(self, n_features, n_outputs, wrap=lambda hidden, logits: logits):
        super().__init__()
        self.hidden, self.head = nn.Linear(n_features, 8), nn.Linear(8, n_outputs)
        self.wrap = wrap

    def forward(self, x):
        hidden = torch.relu(self.hidden(x))
        return self.wrap(hidden, self.head(hidden))


def as_dict(hidden, logits):
    return {"hidden": hidden, "logits": logits}


def as_model_output(hidden, logits):
    return ModelOutput(logits=logits, past_key_values=Cache(), hidden_states=(hidden, logits))


def as_pair(hidden, logits):
    return logits, hidden


def as_scores(hidden, logits):
    return {"scores": logits}


@pytest.mark.parametrize("task", TASKS)
def test_mappings_and_tuples_equal_tensors(task):
    kind, y = TASKS[task]

    plain = make(kind, module=Module, train_split=ValidSplit(3)).fit(X, y)
    for wrap in (as_dict, as_model_output, as_pair):
        net = clone(plain).set_params(module__wrap=wrap).fit(X, y)
        assert_close(results_of(net), results_of(plain), **rounding(6))
        valid_losses = [fitted.history[:, "valid_loss"] for fitted in (net, plain)]
        assert_allclose(*valid_losses, **rounding(6))
        assert relative_flatness(net, X, y) == pytest.approx(relative_flatness(plain, X, y))
        assert net.score(X, y) == pytest.approx(plain.score(X, y))


SOFTMAX = {"module": Ending, "module__function": nn.Softmax(dim=1)}
SIGMOID = {"module": Ending, "module__function": nn.Sigmoid()}


def nll_of_probabilities(p, y):
    return F.nll_loss(p.log(), y)


# functions of outputs that are probabilities, up to a factor of each row
SAME, SHARES = nn.Identity(), nn.Softmax(dim=1)
OWN_CE = {"criterion": criterion_of(F.cross_entropy), "flatness_weight": 0}
OWN_NLL = {"criterion": criterion_of(nll_of_probabilities), "flatness_weight": 0}
OWN_LOGITS = {"criterion": criterion_of(F.binary_cross_entropy_with_logits), "flatness_weight": 0}
OWN_BCE = {"criterion": criterion_of(F.binary_cross_entropy), "flatness_weight": 0}
AS_IT_IS = {"predict_nonlinearity": None}
PROBABILITIES = {
    "classes": (Classifier, {}, NAMES, SHARES),
    "a nonlinearity": (Classifier, {"predict_nonlinearity": torch.sigmoid}, NAMES, torch.sigmoid),
    "nll of softmax": (Classifier, SOFTMAX | {"criterion": nn.NLLLoss}, NAMES, SAME),
    "binary": (Binary, {}, INDEX > 0, torch.sigmoid),
    "labels": (Binary, {}, LABELS, torch.sigmoid),
    "bce of sigmoid": (Binary, SIGMOID | {"criterion": nn.BCELoss}, INDEX > 0, SAME),
    "task of the criterion": (Net, {"criterion": nn.BCEWithLogitsLoss}, INDEX > 0, torch.sigmoid),
    # criteria of a user, of which some take the module's probabilities
    "own, classes": (Classifier, OWN_CE, NAMES, SHARES),
    "own, binary": (Binary, OWN_LOGITS, INDEX > 0, torch.sigmoid),
    "own, labels": (Binary, OWN_LOGITS, LABELS, torch.sigmoid),
    "own nll": (Classifier, SOFTMAX | OWN_NLL, NAMES, SAME),
    "own nll, as it is": (Classifier, SOFTMAX | OWN_NLL | AS_IT_IS, NAMES, SAME),
    "own nll of a sigmoid": (Classifier, SIGMOID | OWN_NLL, NAMES, lambda p: p / p.sum(1)[:, None]),
    "own bce": (Binary, SIGMOID | OWN_BCE, INDEX > 0, SAME),
    "own bce, as it is": (Binary, SIGMOID | OWN_BCE | AS_IT_IS, INDEX > 0, SAME),
    "own bce of labels": (Binary, SIGMOID | OWN_BCE, LABELS, SAME),
    "own bce of labels, as it is": (Binary, SIGMOID | OWN_BCE | AS_IT_IS, LABELS, SAME),
}


@pytest.mark.parametrize("name", PROBABILITIES)
def test_probabilities_their_logarithms_and_classes(name, tmp_path):
    kind, params, y, of_outputs = PROBABILITIES[name]
    net = make(kind, **params, max_epochs=30).fit(X, y)
    with torch.no_grad():
        p = of_outputs(net.module_(torch.tensor(X))).numpy()
    shares = p if p.shape[1] > 1 else np.hstack([1 - p, p])
    assert net.predict_proba(X).dtype == net.predict_log_proba(X).dtype == np.float32
    assert_allclose(net.predict_proba(X), shares, rtol=1e-4, atol=1e-6)
    assert_allclose(net.predict_log_proba(X), np.log(shares), rtol=1e-4, atol=1e-6)
    index = p > 0.5 if y is LABELS else shares.argmax(axis=1)
    assert_array_equal(net.predict(X), index if y is LABELS else net.classes_[index])
    assert len(np.unique(index)) > 1
    # weights that were trained elsewhere, in a net that has seen no data
    net.save_params(f_params=tmp_path / "weights.pt")
    sizes = {"module__n_features": 4, "module__n_outputs": p.shape[1]}
    for method, expected in [
        ("predict", index),
        ("predict_proba", shares),
        ("predict_log_proba", np.log(shares)),
    ]:
        other = make(kind, **params, **sizes).initialize()
        other.load_params(f_params=tmp_path / "weights.pt")
        assert_allclose(getattr(other, method)(X), expected, rtol=1e-4, atol=1e-6)
    assert not make(kind, **params, **sizes).initialize().forward(X).requires_grad


class Brier(nn.MSELoss):
    """The user's own, although its class is of torch's losses of a regression."""

    def forward(self, p, y):
        return super().forward(p, F.one_hot(y, p.shape[1]).to(p))


def test_each_net_of_a_fleet_knows_that_its_module_returns_probabilities():
    params = SOFTMAX | {"criterion": Brier, "flatness_weight": 0}
    nets = [make(Classifier, **params, random_state=seed) for seed in range(3)]
    for net, alone in zip(FleetTrainer(nets, fleet=3).fit(X, NAMES).estimators_, nets, strict=True):
        with torch.no_grad():
            assert_allclose(net.predict_proba(X), net.module_(torch.tensor(X)), rtol=FLOAT32)
        assert_allclose(net.predict_proba(X), alone.fit(X, NAMES).predict_proba(X), **rounding(9))


@pytest.mark.parametrize("params", [{"flatness_weight": 0}, OWN_LOGITS], ids=["torch's", "own"])
@pytest.mark.parametrize("y", [INDEX > 0, LABELS], ids=["binary", "labels"])
def test_labels_are_those_of_the_criterion_where_outputs_are_returned_as_they_are(y, params):
    net = make(Binary, **AS_IT_IS, **params).fit(X, y)
    logits = net.predict_proba(X)
    logits = logits[:, 1:] if y is not LABELS else logits
    assert ((logits > 0) & (logits < 0.5)).any()
    assert_array_equal(net.predict(X).reshape(len(X), -1), logits > 0)


@pytest.mark.parametrize("task", ["classes", "binary", "labels"])
def test_no_logarithm_of_zero(task):
    kind, y = TASKS[task]
    net = make(kind, module__hidden_layer_sizes=()).fit(X, y)
    far = 1000 * X
    logits = torch.cat(list(net.forward_iter(far))).double().numpy()
    assert (net.predict_proba(far) == 0).any()
    expected = log_softmax(logits, axis=1) if task == "classes" else log_expit(logits)
    if task == "binary":
        expected = np.hstack([log_expit(-logits), expected])
    assert_allclose(net.predict_log_proba(far), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("data", [dataset, Stream])
def test_classes_are_those_of_the_outputs(data):
    # one class more than there are labels
    net = make(module__n_features=4, module__n_outputs=4)
    assert not hasattr(net, "classes_")
    net.fit(data())
    assert net.predict_proba(X).shape == (42, 4)
    assert net.predict(X).dtype.kind == "i"
    for again in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert_array_equal(again.classes_, np.arange(4))
        assert relative_flatness(again, X, INDEX) == pytest.approx(net.relative_flatness_, rel=1e-5)
    assert not hasattr(clone(net), "classes_")


def test_classes_of_other_tasks():
    positive = (INDEX > 0).astype("f4")[:, None]
    net = make(Binary, module__n_features=4, module__n_outputs=1).fit(dataset(positive))
    assert_array_equal(net.classes_, [0, 1])
    assert net.predict(X).shape == (42,)
    assert relative_flatness(net, X, positive) > 0  # targets as they were
    net = make(Binary, **SIZES).fit(dataset(LABELS.astype("f4")))
    assert_array_equal(net.classes_, [0, 1, 2])
    assert net.predict(X).shape == (42, 3)
    net = make(Regressor, module__n_features=4, module__n_outputs=1).fit(dataset(X[:, :1]))
    assert not hasattr(net, "classes_")
    assert net.predict(X).shape == (42, 1)


# -- the list of classes, as skorch's classifiers take it ----------------------------------

ORDER = ["z", "x", "y"]
TO = np.array([1, 2, 0])  # from positions among x, y, z to those in ORDER


@pytest.mark.filterwarnings("ignore:.*not sorted:relflat_sk.FlatnessWarning")
@pytest.mark.parametrize("kind", [Classifier, Net])
def test_classes_name_the_outputs_in_their_order(kind):
    params = {"classes": ORDER, "max_epochs": 30}
    net = make(kind, **params).fit(X, NAMES)
    assert net.classes_.tolist() == ORDER
    assert_array_equal(net.predict(X), np.array(ORDER)[net.predict_proba(X).argmax(1)])
    assert net.score(X, NAMES) > 0.8
    assert relative_flatness(net, X, NAMES) == pytest.approx(net.relative_flatness_, rel=1e-4)
    loaded = make(kind, **params, **SIZES).fit(dataset(TO[INDEX]), None)
    assert_array_equal(loaded.predict(X), net.predict(X))


def test_classes_that_y_lacks_have_outputs():
    rows = INDEX < 2
    net = make(classes=["x", "y", "z"]).fit(X[rows], NAMES[rows])
    assert net.predict_proba(X).shape == (42, 3)
    net.partial_fit(X, NAMES)
    with pytest.warns(FlatnessWarning, match="not sorted.*neg_log_loss"):
        flipped = make(Binary, classes=[True, False], max_epochs=30).fit(X, INDEX > 0)
    assert flipped.score(X, INDEX > 0) > 0.8
    assert flipped.classes_.tolist() == [True, False]


@pytest.mark.parametrize("params", [{}, {"flatness_weight": 0.2}, {"flatness_clip": 0.4}])
def test_a_weight_that_nobody_chose_is_not_said_not_to_matter(params, recwarn):
    net = Regressor(verbose=0, random_state=0, batch_size=4, **params)
    y = np.exp(9 + 0.1 * X[:, 0].astype(float))
    TransformedTargetRegressor(net, func=np.log, inverse_func=np.exp).fit(X, y)
    said = [str(warning.message) for warning in recwarn if warning.category is FlatnessWarning]
    assert all("did not matter" in message for message in said)
    assert len(said) == bool(params)

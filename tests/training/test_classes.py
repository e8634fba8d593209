"""The list of classes, as skorch's classifiers take it, and a weight that nobody chose."""

import numpy as np
import pytest
import torch
from sklearn.compose import TransformedTargetRegressor
from torch.utils.data import TensorDataset

from relflat_sk import relative_flatness
from relflat_sk.exceptions import FlatnessWarning
from tests.training.common import INDEX, NAMES, SIZES, Binary, Classifier, Net, Regressor, X, make

ORDER = ["z", "x", "y"]
TO = np.array([1, 2, 0])  # from positions among x, y, z to those in ORDER


@pytest.mark.parametrize("kind", [Classifier, Net])
def test_classes_name_the_outputs_in_their_order(kind):
    net = make(kind, classes=ORDER, max_epochs=30).fit(X, NAMES)
    assert net.classes_.tolist() == ORDER
    np.testing.assert_array_equal(net.predict(X), np.array(ORDER)[net.predict_proba(X).argmax(1)])
    assert net.score(X, NAMES) > 0.8
    data = TensorDataset(torch.tensor(X), torch.tensor(TO[INDEX]))
    assert relative_flatness(net, X, NAMES) == pytest.approx(net.relative_flatness_, rel=1e-4)
    loaded = make(kind, classes=ORDER, max_epochs=30, **SIZES).fit(data, None)
    np.testing.assert_array_equal(loaded.predict(X), net.predict(X))


def test_classes_that_y_lacks_have_outputs():
    rows = INDEX < 2
    net = make(classes=["x", "y", "z"]).fit(X[rows], NAMES[rows])
    assert net.predict_proba(X).shape == (42, 3)
    net.partial_fit(X, NAMES)
    flipped = make(Binary, classes=[True, False], max_epochs=30).fit(X, INDEX > 0)
    assert flipped.score(X, INDEX > 0) > 0.8
    assert flipped.classes_.tolist() == [True, False]


@pytest.mark.parametrize(
    ("kind", "params", "y", "match"),
    [
        (Classifier, {"classes": ["x", "y"]}, NAMES, "not seen"),
        (Classifier, {"classes": ["x", "x", "y"]}, NAMES, "different labels"),
    ],
)
def test_wrong_classes_are_refused(kind, params, y, match):
    with pytest.raises(ValueError, match=match):
        make(kind, **params).fit(X, y)
    data = TensorDataset(torch.tensor(X), torch.tensor(INDEX))
    with pytest.raises(ValueError, match="3 outputs"):
        make(classes=["x", "y"], **SIZES).fit(data, None)


@pytest.mark.parametrize("params", [{}, {"flatness_weight": 0.2}, {"flatness_clip": 0.4}])
def test_a_weight_that_nobody_chose_is_not_said_not_to_matter(params, recwarn):
    net = Regressor(verbose=0, random_state=0, batch_size=4, **params)
    y = np.exp(9 + 0.1 * X[:, 0].astype(float))
    TransformedTargetRegressor(net, func=np.log, inverse_func=np.exp).fit(X, y)
    said = [str(one.message) for one in recwarn if issubclass(one.category, FlatnessWarning)]
    assert [one for one in said if "did not matter" in one] == said
    assert len(said) == bool(params)

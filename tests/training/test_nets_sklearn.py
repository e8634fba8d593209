"""The whole of scikit-learn's contract, for all three tasks."""

import pytest
import sklearn
from sklearn.utils.estimator_checks import SkipTest, estimator_checks_generator
from sklearn.utils.fixes import parse_version

from tests.training.common import Binary, Classifier, Regressor

# scikit-learn skips it unless SCIPY_ARRAY_API is set, for every estimator
NOT_ASKED_FOR = {"check_array_api_input"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "epochs", "weight"),
    [
        (Classifier, 3, 0.1),
        pytest.param(
            Binary,
            3,
            0,
            marks=pytest.mark.skipif(
                parse_version(sklearn.__version__) < parse_version("1.7"),
                reason="scikit-learn 1.6 makes two classes of three by the first label, before and"
                " after a shuffle, so that its weighted and its repeated data differ",
            ),
        ),
        (Regressor, 4, 0.1),
    ],
)
def test_sklearn_contract(kind, epochs, weight):
    net = kind(verbose=0, random_state=0, lr=0.03, max_epochs=epochs, flatness_weight=weight)
    passed = set()
    for estimator, check in estimator_checks_generator(net):
        name = check.func.__name__
        try:
            check(estimator)
            passed.add(name)
        except SkipTest:
            assert name in NOT_ASKED_FOR
    assert "check_sample_weight_equivalence_on_dense_data" in passed
    assert len(passed) > 50

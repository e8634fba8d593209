"""The whole of scikit-learn's contract, for all three tasks; run with -s to see the checks."""

import pytest
from sklearn.utils.estimator_checks import SkipTest, estimator_checks_generator

from relflat_sk import (
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedRegressor,
)

# scikit-learn skips it unless SCIPY_ARRAY_API is set, for every estimator
NOT_ASKED_FOR = {"check_array_api_input"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "weight", [0.1, pytest.param(0, marks=pytest.mark.slow)], ids=["penalised", "plain"]
)
@pytest.mark.parametrize(
    ("kind", "epochs"),
    [
        (RelativeFlatnessRegularizedClassifier, 30),
        (RelativeFlatnessRegularizedBinaryClassifier, 20),
        (RelativeFlatnessRegularizedRegressor, 30),
    ],
)
def test_sklearn_contract(kind, epochs, weight):
    made = kind(verbose=0, random_state=0, max_epochs=epochs, flatness_weight=weight)
    passed, skipped = set(), set()
    for net, check in estimator_checks_generator(made):
        name = check.func.__name__
        try:
            check(net)
            passed.add(name)
        except SkipTest:
            skipped.add(name)
    print(f"\n{kind.__name__}: {len(passed)} checks passed, {len(skipped)} skipped {skipped}")
    print(*sorted(passed), sep="\n")
    assert skipped <= NOT_ASKED_FOR
    assert "check_sample_weight_equivalence_on_dense_data" in passed
    assert len(passed) > 50

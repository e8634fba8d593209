"""A search, and the choice of a penalty by folds, pass scikit-learn's own checks of estimators."""

import optuna
import pytest
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.utils.estimator_checks import SkipTest, estimator_checks_generator

from relflat_sk import (
    FlatMinimaSearch,
    RelativeFlatnessPenaltyCV,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedRegressor,
)

# the checks have data on which no network is a minimum
NET = RelativeFlatnessRegularizedClassifier(max_epochs=15, verbose=0)
SETTINGS = {"max_epochs": 15, "lr": 0.03, "verbose": 0, "random_state": 0}
OF_CLASSES = RelativeFlatnessRegularizedClassifier(**SETTINGS)
OF_VALUES = RelativeFlatnessRegularizedRegressor(**SETTINGS)
NONE = [{"flatness_weight": 0}]
SEARCHES = {  # and whether its checks take minutes
    "classifier": (FlatMinimaSearch(LogisticRegression(max_iter=1000), {"C": [0.1, 1.0]}), False),
    "regressor": (FlatMinimaSearch(Ridge(), {"alpha": [1.0]}), False),
    "our classifier": (FlatMinimaSearch(NET, {"batch_size": [32]}, random_state=0), True),
    "penalty of a classifier": (RelativeFlatnessPenaltyCV(OF_CLASSES, NONE, cv=2), False),
    "penalty of a regressor": (RelativeFlatnessPenaltyCV(OF_VALUES, NONE, cv=2), True),
}
CHECKS = [
    pytest.param(
        estimator,
        check,
        id=f"{name}-{check.func.__name__}",
        marks=[pytest.mark.scale] if is_long else [],
    )
    for name, (search, is_long) in SEARCHES.items()
    for estimator, check in estimator_checks_generator(search)
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("search", "check"), CHECKS)
def test_check_of_scikit_learn(search, check):
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        check(search)
    except SkipTest as reason:
        pytest.skip(str(reason))

"""Tests of distributions of scipy in a space."""

import numpy as np
import optuna
import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.samplers import RandomSampler
from scipy import stats
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

from relflat_sk import FlatMinimaSearch
from relflat_sk.search._trial.scipy_distributions import Quantiles
from relflat_sk.search._trial.space import Space

X, Y = load_iris(return_X_y=True)


def draw(distribution, n=400):
    space = Space({"x": distribution})
    study = optuna.create_study(sampler=RandomSampler(seed=0))
    trials = [study.ask() for _ in range(n)]
    return [space.suggest(trial)["x"] for trial in trials], study.trials, space


@pytest.mark.parametrize(
    ("distribution", "expected"),
    [
        (stats.uniform(1, 2), FloatDistribution(1.0, 3.0)),
        (stats.uniform(loc=-1, scale=4), FloatDistribution(-1.0, 3.0)),
        (stats.loguniform(1e-3, 10), FloatDistribution(1e-3, 10.0, log=True)),
        (stats.reciprocal(1, 5), FloatDistribution(1.0, 5.0, log=True)),
        (stats.randint(2, 5), IntDistribution(2, 4)),
        (stats.randint(2, 5, loc=3), IntDistribution(5, 7)),
    ],
)
def test_ranges_of_numbers_are_those_of_optuna(distribution, expected):
    assert Space({"x": distribution}).distributions() == {"x": expected}


@pytest.mark.parametrize(
    "distribution",
    [
        stats.norm(3, 2),
        stats.expon(scale=0.1),
        stats.loguniform(1, 10, loc=5),
        stats.poisson(4),
        stats.binom(10, 0.3),
    ],
    ids=lambda distribution: distribution.dist.name,
)
def test_other_distributions_are_drawn_by_their_quantiles(distribution):
    values, trials, space = draw(distribution)
    discrete = isinstance(distribution.dist, stats.rv_discrete)
    assert {type(value) for value in values} == {int if discrete else float}
    shares = distribution.cdf(np.array(values))
    if discrete:
        assert abs(np.mean(values) - distribution.mean()) < 4 * distribution.std() / 20
    else:
        assert stats.kstest(shares, "uniform").pvalue > 0.01
    # the table has the value, and a finished trial gives it again
    assert trials[0].user_attrs["param_x"] == values[0]
    assert space.values(trials[0]) == {"x": values[0]}


def test_quantiles_are_finite():
    for share in (0.0, 1.0):
        trial = optuna.trial.FixedTrial({"x_quantile": share})
        assert np.isfinite(Quantiles("x", stats.norm())(trial))


def test_description_has_the_arguments():
    assert repr(Quantiles("x", stats.norm(3, scale=2))) == "norm(3, scale=2)"


@pytest.mark.skipif(not hasattr(stats, "Normal"), reason="needs scipy 1.15")
def test_new_distributions_of_scipy():
    space = Space({"x": stats.Uniform(a=1.0, b=2.0), "z": stats.Normal(mu=1.0, sigma=2.0)})
    assert space.distributions() == {"x": FloatDistribution(1.0, 2.0)}
    trial = optuna.trial.FixedTrial({"x": 1.5, "z_quantile": 0.5})
    assert space.suggest(trial) == {"x": 1.5, "z": pytest.approx(1.0)}
    assert repr(Quantiles("z", stats.Normal(mu=1.0, sigma=2.0))).startswith("Normal(")


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_search_over_distributions(n_jobs, tmp_path):
    space = {"C": stats.expon(scale=2.0), "fit_intercept": [True, False]}
    search = FlatMinimaSearch(
        LogisticRegression(max_iter=1000),
        space,
        n_trials=4,
        n_jobs=n_jobs,
        random_state=0,
        storage=f"sqlite:///{tmp_path}/minima.db",
        study_name="s",
        depth_band=None,
    )
    table = search.fit(X, Y).minima_
    assert (table["param_C"] > 0).all()
    assert table["param_C"].iloc[0] == search.best_estimator_.C
    again = search.set_params(n_trials=5).fit(X, Y).minima_
    assert len(again) == 5
    with pytest.raises(ValueError, match="C"):
        search.set_params(space={**space, "C": stats.expon(scale=3.0)}).fit(X, Y)

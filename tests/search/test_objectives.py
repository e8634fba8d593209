"""Tests of searches with several objectives."""

import pytest
from optuna.distributions import FloatDistribution
from optuna.samplers import NSGAIIISampler, NSGAIISampler, TPESampler

from tests.search.examples import X, Y, logistic, make_net, make_search

pytestmark = pytest.mark.filterwarnings("ignore:.* candidates are no minima")


def search_for_both(n_trials=12, sampler=None, **parameters):
    return logistic(
        {"C": FloatDistribution(0.01, 10.0, log=True)},
        measure=["relative_flatness", "train_loss"],
        sampler=NSGAIISampler(population_size=4, seed=0) if sampler is None else sampler,
        n_trials=n_trials,
        **parameters,
    )


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("sampler", [NSGAIISampler, NSGAIIISampler])
def test_flatness_against_loss(sampler):
    search = search_for_both(sampler=sampler(population_size=4, seed=0)).fit(X, Y)
    assert len(search.study_.directions) == 2
    table = search.minima_
    assert len(table) == 12
    # the front, by its definition
    values = table[["relative_flatness", "train_loss"]].to_numpy()
    beaten = [
        any((other <= one).all() and (other < one).any() for other in values) for one in values
    ]
    assert table["pareto"].tolist() == [not one for one in beaten]
    # the first objective ranks
    assert table["relative_flatness"].is_monotonic_increasing
    assert -search.best_score_ == table["relative_flatness"][0]
    assert search.score(X, Y) > 0.5


def test_several_objectives_are_resumed(stored):
    search_for_both(4, **stored).fit(X, Y)
    search = search_for_both(8, refit=False, **stored).fit(X, Y)
    assert len(search.minima_) == 8
    single = search_for_both(9, sampler=TPESampler(seed=0), **stored)
    with pytest.raises(ValueError, match=r"its directions are \['minimize', 'minimize'\]"):
        single.fit(X, Y)


def test_other_samplers_have_one_objective():
    search = search_for_both(3, sampler=TPESampler(seed=0)).fit(X, Y)
    assert len(search.study_.directions) == 1
    assert "pareto" not in search.minima_
    assert search.minima_["train_loss"].notna().all()


def test_the_worst_of_a_front_does_not_count():
    """A net that never learned anything is perfectly flat, but not on the front."""
    search = make_search(
        make_net(),
        {"lr": [0.05, 1e10]},
        measure=["relative_flatness", "train_loss"],
        sampler=NSGAIISampler(seed=1),
        n_trials=6,
    ).fit(X, Y)
    table = search.minima_
    assert set(table["param_lr"]) == {0.05, 1e10}
    assert not table.loc[table["param_lr"] == 1e10, "pareto"].any()

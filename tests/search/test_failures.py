"""Tests of failing candidates and of several objectives."""

import numpy as np
import pytest
import torch
from optuna.distributions import FloatDistribution
from optuna.samplers import NSGAIIISampler, NSGAIISampler, TPESampler
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import scale

from relflat_sk import FlatMinimaSearch, RelativeFlatnessRegularizedClassifier

pytestmark = pytest.mark.filterwarnings("ignore:.* candidates are no minima")

X, Y = load_iris(return_X_y=True)
X = scale(X).astype(np.float32)


class RunsOut(LogisticRegression):
    """Runs out of memory in the way that class_weight names."""

    def fit(self, X, y):
        if self.class_weight == "numpy":
            raise MemoryError("Unable to allocate 3. PiB for an array")
        if self.class_weight == "torch":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 PiB")
        return super().fit(X, y)


def test_running_out_of_memory_does_not_end_the_sweep():
    search = FlatMinimaSearch(
        RunsOut(max_iter=1000), {"class_weight": ["numpy", "torch", None]}, random_state=0
    ).fit(X, Y)
    table = search.minima_.set_index("param_class_weight")
    assert table["state"].tolist() == ["complete", "failed", "failed"]
    assert table["reason"]["numpy"] == "MemoryError: Unable to allocate 3. PiB for an array"
    assert table["reason"]["torch"].startswith("OutOfMemoryError: CUDA out of memory")
    assert search.best_params_ == {"class_weight": None}


def test_memory_of_a_device_is_given_back_after_a_failure(monkeypatch):
    """A large candidate fills torch's cache, which the next one may need."""
    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    space = {"class_weight": ["torch", None]}
    FlatMinimaSearch(RunsOut(max_iter=1000), space, refit=False).fit(X, Y)
    assert len(emptied) == 1


# -- several objectives ------------------------------------------------------------------------


def search_for_both(n_trials=12, sampler=None, **parameters):
    return FlatMinimaSearch(
        LogisticRegression(max_iter=1000),
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


def test_several_objectives_are_resumed(tmp_path):
    parameters = {"storage": f"sqlite:///{tmp_path / 'minima.db'}", "study_name": "sweep"}
    search_for_both(4, **parameters).fit(X, Y)
    search = search_for_both(8, refit=False, **parameters).fit(X, Y)
    assert len(search.minima_) == 8
    single = search_for_both(9, sampler=TPESampler(seed=0), **parameters)
    with pytest.raises(ValueError, match=r"its directions are \['minimize', 'minimize'\]"):
        single.fit(X, Y)


def test_other_samplers_have_one_objective():
    search = search_for_both(3, sampler=TPESampler(seed=0)).fit(X, Y)
    assert len(search.study_.directions) == 1
    assert "pareto" not in search.minima_
    assert search.minima_["train_loss"].notna().all()


def test_the_worst_of_a_front_does_not_count():
    """A net that never learned anything is perfectly flat, but not on the front."""
    net = RelativeFlatnessRegularizedClassifier(
        flatness_weight=0, module__hidden_layer_sizes=(4,), max_epochs=40, verbose=0
    )
    search = FlatMinimaSearch(
        net,
        {"lr": [0.05, 1e10]},
        measure=["relative_flatness", "train_loss"],
        sampler=NSGAIISampler(seed=1),
        n_trials=6,
        random_state=0,
    ).fit(X, Y)
    table = search.minima_
    assert set(table["param_lr"]) == {0.05, 1e10}
    assert not table.loc[table["param_lr"] == 1e10, "pareto"].any()

"""Tests of resumed studies: what changes results is refused, what does not goes on."""

import functools
import inspect

import numpy as np
import optuna
import pandas as pd
import pytest
import torch
from joblib import Parallel, delayed
from optuna.distributions import FloatDistribution
from optuna.samplers import RandomSampler
from scipy import sparse
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch.dataset import Dataset as SkorchDataset
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from relflat_sk import FlatnessScorer, FlatnessWarning, MinimaObjective, StopAtLoss, rank_minima
from relflat_sk.search._space import describe
from relflat_sk.search._storage import open_storage
from tests.search import examples
from tests.search.examples import NO_MINIMA, X_TEST, Y_TEST, X, Y, load, make_search


class Linear(nn.Module):
    def __init__(self, n_features=4, n_outputs=3, hidden_layer_sizes=()):
        super().__init__()
        self.layer = nn.Linear(n_features, n_outputs)

    def forward(self, x):
        return self.layer(x)


class OwnRows(TorchDataset):
    """Holds its data in a private attribute."""

    def __init__(self, rows):
        self._rows = rows

    def __len__(self):
        return len(self._rows)


def of_nets(space=None, **parameters):
    small = {"module__hidden_layer_sizes": (4,), "batch_size": 32, "max_epochs": 2}
    net = examples.make_net(**{**small, "callbacks": [StopAtLoss(0.5)], **parameters})
    return make_search(net, {"batch_size": [16, 32]} if space is None else space, refit=False)


def of_pipelines(*steps, **parameters):
    model = LogisticRegression(max_iter=1000)
    pipeline = make_pipeline(*(steps or [StandardScaler()]), model).set_params(**parameters)
    return logistic({"logisticregression__C": [0.5, 1.0]}, pipeline)


def logistic(space=None, estimator=None, **parameters):
    return examples.logistic(space or {"C": [0.5, 1.0]}, estimator, **parameters)


def of_callbacks(goal):
    """Optuna knows a callback by a label only."""

    class Stop(StopAtLoss):
        def __repr__(self):
            return "stop"

    return of_nets({"callbacks": [[Stop(goal)], None]}, max_epochs=20)


def of_scaled_nets(**parameters):
    """The rates follow from the estimator's own batch size."""
    return of_nets({"batch_size": [16, 32], "lr_scaling": ["linear"]}, **parameters)


def of_ranges(space):
    return logistic(space, n_trials=2)


NETS, LOGISTIC, PIPELINES = of_nets(), logistic(), of_pipelines()
RANGE, LOG = FloatDistribution(0.5, 1.0), FloatDistribution(0.5, 1.0, log=True)
MIXED = {"C": RANGE, "tol": lambda trial: 1e-4}
DRAWN = {"C": [0.5, 1.0], "tol": lambda trial: 1e-3}
FUNCTION = of_ranges(lambda trial: {"C": trial.suggest_float("C", 0.5, 1.0)})
REFUSED = [  # a search, another one, and what the message names
    (NETS, of_nets(module=Linear), "module"),
    (NETS, of_nets(module__hidden_layer_sizes=(8,)), "module__hidden_layer_sizes"),
    (NETS, of_nets(callbacks=[StopAtLoss(0.1)]), "callbacks"),
    (NETS, of_nets(random_state=3), "random_state"),
    (of_scaled_nets(), of_scaled_nets(batch_size=64), "batch_size"),
    (of_callbacks(0.6), of_callbacks(0.7), "space callbacks: "),
    (PIPELINES, of_pipelines(logisticregression__tol=0.1), "logisticregression__tol"),
    (PIPELINES, of_pipelines(standardscaler="passthrough"), "standardscaler"),
    (PIPELINES, of_pipelines(StandardScaler(), StandardScaler()), "steps"),
    (LOGISTIC, logistic(random_state=None), "search random_state"),
    (LOGISTIC, logistic(goal=0.9), "search goal"),
    (LOGISTIC, logistic(measure="l2_norm"), "search objectives"),
    (LOGISTIC, logistic(measure=FlatnessScorer(layer=0)), "measure relative_flatness"),
    (LOGISTIC, logistic(measure=FlatnessScorer(measure_params={"rtol": 1.0})), "measure rel"),
    (LOGISTIC, of_ranges({"C": [0.5, 1.0, 2.0]}), "space C"),
    (LOGISTIC, of_ranges({"C": RANGE}), "space C"),
    (LOGISTIC, of_ranges(DRAWN), "space tol: nothing then"),
    (of_ranges(MIXED), of_ranges({"C": LOG}), "space C"),
    (of_ranges(MIXED), of_ranges({"C": RANGE}), "space tol: .* nothing now"),
    (of_ranges(MIXED), of_ranges({**MIXED, "tol": lambda trial: 1e-5}), "space tol"),
    (FUNCTION, of_ranges(lambda trial: {"C": 0.5}), "space : "),
]
GOES_ON = {
    "verbose": (LOGISTIC, logistic(verbose=1)),
    "sampler": (LOGISTIC, logistic(sampler=RandomSampler(seed=0), n_trials=4)),
    "pruner": (LOGISTIC, logistic(pruner=optuna.pruners.MedianPruner())),
    "in the space": (LOGISTIC, logistic(estimator=LogisticRegression(max_iter=1000, C=5.0))),
    "in a pipeline": (PIPELINES, of_pipelines(logisticregression__C=7.0)),
}


@pytest.mark.filterwarnings("ignore:no candidate converged")
@NO_MINIMA
@pytest.mark.parametrize(("first", "other", "match"), REFUSED)
def test_what_changes_results_is_refused(stored, first, other, match):
    clone(first).set_params(**stored).fit(X, Y)
    with pytest.raises(ValueError, match=f"(?s)study 'sweep' was made .*{match}.*study_name"):
        other.set_params(**stored).fit(X, Y)
    assert len(load(stored).trials) == 2


@pytest.mark.parametrize("case", GOES_ON)
def test_what_does_not_change_results_goes_on(stored, case):
    first, again = GOES_ON[case]
    trials = clone(first).set_params(**stored).fit(X, Y).study_.trials
    assert again.set_params(**stored).fit(X, Y).study_.trials[:2] == trials


@pytest.mark.parametrize(
    ("data", "name"),
    [((X + 1, Y), "X"), ((X, Y[::-1]), "y"), ((X, Y, X_TEST[:9], Y_TEST[:9]), "X_test")],
)
def test_other_data_are_refused(stored, data, name):
    logistic(**stored).fit(X, Y, X_TEST, Y_TEST)
    with pytest.raises(ValueError, match=rf"\n  {name}: .* then, .* now"):
        logistic(**stored).fit(*data)


@pytest.mark.filterwarnings("ignore:no candidate converged")
def test_edits_and_arguments_of_fit_are_refused(stored, monkeypatch):
    search = of_nets(module=Linear).set_params(**stored).fit(X, Y, epochs=2)
    with pytest.raises(ValueError, match="fit epochs: 2 then, 3 now"):
        search.fit(X, Y, epochs=3)
    source = inspect.getsource(Linear)
    monkeypatch.setattr(
        inspect, "getsource", lambda code: source + "# edited" if code is Linear else str(code)
    )
    with pytest.raises(ValueError, match="module: Linear .* then, Linear"):
        search.fit(X, Y, epochs=2)


@pytest.mark.parametrize("now", [(0.1, 5.0), (2.0, 3.0)], ids=["wider", "elsewhere"])
def test_a_range_may_change_and_trials_stay_what_they_are(stored, now):
    logistic({"C": RANGE}, n_trials=2, **stored).fit(X, Y)
    found = logistic({"C": FloatDistribution(*now)}, n_trials=3, refit=False, **stored).fit(X, Y)
    assert len(found.minima_) == 3
    for trial, params in zip(found.study_.trials, found.cv_results_["params"], strict=True):
        assert params == trial.params
        assert params["C"] == found.get_estimator(trial.number).C


def test_held_out_data_and_measures_that_come_later(kept):
    logistic(**kept).fit(X, Y)
    both = ["relative_flatness", "l2_norm"]
    later = logistic(measure=both, **kept).fit(X, Y, X_TEST, Y_TEST)
    assert len(later.study_.trials) == 2
    whole = logistic(measure=both).fit(X, Y, X_TEST, Y_TEST).minima_
    names = ["l2_norm", "test_loss", "generalization_gap", "test_score", "train_score"]
    np.testing.assert_allclose(later.minima_[names], whole[names], rtol=1e-6)
    assert later.best_score_ == -whole["relative_flatness"][0]
    # a session without them goes on, and what they are stays known
    assert logistic(**kept).fit(X, Y).minima_["test_loss"].equals(later.minima_["test_loss"])
    with pytest.raises(ValueError, match="X_test: "):
        logistic(**kept).fit(X, Y, X_TEST[::-1], Y_TEST)


def test_without_weights_nan_is_explained(stored):
    space = {"C": [0.5, 1.0, 2.0]}
    logistic(space, n_trials=2, **stored).fit(X, Y)
    search = logistic(space, measure=["relative_flatness", "l2_norm"], **stored)
    with pytest.warns(FlatnessWarning, match=r"l2_norm, test_loss of trials \[0, 1\] stay nan"):
        search.fit(X, Y, X_TEST, Y_TEST)
    table = search.minima_.set_index("trial").sort_index()
    for name in ("test_loss", "l2_norm"):
        assert table[name].isna().tolist() == [True, True, False]
    assert table["relative_flatness"].notna().all()


def test_a_study_that_does_not_say_how_it_was_made_can_be_read_and_is_not_resumed(stored):
    """As one of an earlier version, whose trials have their seeds as texts."""
    study = logistic(**stored).fit(X, Y).study_
    old = optuna.create_study(storage=open_storage(stored["storage"]), study_name="old")
    for trial in study.trials:
        details = trial.user_attrs["details"]
        details["seed"] = str(details["seed"])
        trial.user_attrs = {**trial.user_attrs, "details": details, "process": ["here", 1, "2", 3]}
        old.add_trial(trial)
    pd.testing.assert_frame_equal(rank_minima(old), rank_minima(study))
    with pytest.raises(ValueError, match="study 'old' does not say how its minima were made"):
        logistic(**{**stored, "study_name": "old"}).fit(X, Y)


def test_the_objective_refuses_a_study_of_something_else(tmp_path):
    first, other = (
        MinimaObjective(LogisticRegression(max_iter=1000, tol=tol), X, Y, {"C": [0.1]})
        for tol in (1e-4, 0.1)
    )
    study = optuna.create_study(storage=f"sqlite:///{tmp_path / 'minima.db'}")
    study.optimize(first, n_trials=2)
    with pytest.raises(ValueError, match="tol: 0.0001 then, 0.1 now"):
        study.optimize(other, n_trials=1)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2 + ["FAIL"]
    assert "failed" not in study.trials[-1].user_attrs


# -- how values are known -------------------------------------------------------------------------


class Scaled:
    def __init__(self, factor):
        self.factor, self.other = factor, object()


def linear(seed):
    torch.manual_seed(seed)
    return nn.Linear(2, 3)


def two(x):
    return 2 * x


def three(x):
    return 3 * x


def tensors(value):
    return TensorDataset(torch.from_numpy(X) + value, torch.from_numpy(Y))


# what makes a value of a number
VALUES = {
    "function": {1: two, 2: three}.get,
    "partial": lambda n: functools.partial(max, n),
    "object": Scaled,
    "weights": linear,
    "RandomState": np.random.RandomState,
    "long": lambda n: [*range(1000), n],
    "objects": lambda n: np.array(["a", str(n)], dtype=object),
    "bfloat16": lambda n: torch.tensor([1.0, n], dtype=torch.bfloat16),
    "sparse": lambda n: sparse.csr_array([[0.0, n]]),
    "frame": lambda n: pd.DataFrame({"a": [1.0, n]}),
    "mapping": lambda n: {"a": np.array([n]), "b": [1]},
    "strided": lambda n: np.array([1.0, 2.0, n, 4.0])[::2],
    "tuple": lambda n: (X, X + n),
    "subset": lambda n: Subset(tensors(n), range(75)),
    "loader": lambda n: DataLoader(tensors(n), batch_size=75),
    "skorch": lambda n: SkorchDataset(X + n, Y),
    "own": lambda n: OwnRows(X + n),
}


def test_descriptions_are_equal_if_training_is_also_in_another_process():
    elsewhere = Parallel(2)(delayed(describe)(make(1)) for make in VALUES.values())
    for (name, make), same in zip(VALUES.items(), elsewhere, strict=True):
        assert describe(make(1)) == same != describe(make(2)), name
        assert len(same) < 230


def test_what_cannot_be_pickled_is_said():
    class Slotted:
        __slots__ = ()

        def __reduce_ex__(self, protocol):
            raise RuntimeError("the connection is open")

    with pytest.warns(FlatnessWarning, match=r"Slotted.*\(RuntimeError: the connection is open\)"):
        describe(Slotted())

"""Tests of resumed studies: what changes results is refused, what does not goes on."""

import functools
import inspect
from functools import cache

import numpy as np
import optuna
import pandas as pd
import pytest
import torch
from joblib import Parallel, delayed
from optuna.distributions import FloatDistribution
from optuna.samplers import RandomSampler
from scipy import sparse
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch.dataset import Dataset as SkorchDataset
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from relflat_sk import FlatnessScorer, FlatnessWarning, MinimaObjective, StopAtLoss, rank_minima
from relflat_sk.search._describe import describe
from relflat_sk.search._recipe import MADE_WITH
from relflat_sk.search._storage import open_storage
from tests.search import examples
from tests.search.examples import X_TEST, Y_TEST, X, Y, load, make_search


class Linear(nn.Module):
    def __init__(self, n_features=4, n_outputs=3, hidden_layer_sizes=()):
        super().__init__()
        self.layer = nn.Linear(n_features, n_outputs)

    def forward(self, x):
        return self.layer(x)


def make_net(**parameters):
    small = {"module__hidden_layer_sizes": (4,), "batch_size": 32, "max_epochs": 2}
    return examples.make_net(**{**small, "callbacks": [StopAtLoss(0.5)], **parameters})


def of_nets(space=None, **parameters):
    space = {"batch_size": [16, 32]} if space is None else space
    return make_search(make_net(**parameters), space, refit=False)


def of_pipelines(estimator=None, **parameters):
    if estimator is None:
        estimator = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    return logistic({"logisticregression__C": [0.5, 1.0]}, estimator.set_params(**parameters))


def logistic(space=None, estimator=None, **parameters):
    return examples.logistic(space or {"C": [0.5, 1.0]}, estimator, **parameters)


def stopping(goal):
    """Optuna knows a callback by a label only."""

    class Stop(StopAtLoss):
        def __repr__(self):
            return "stop"

    return of_nets({"callbacks": [[Stop(goal)], None]}, max_epochs=20)


def of_scaled_nets(**parameters):
    """The rates follow from the estimator's own batch size."""
    return of_nets({"batch_size": [16, 32], "lr_scaling": ["linear"]}, **parameters)


RANGES = {"C": FloatDistribution(0.5, 1.0), "tol": lambda trial: 1e-4}


def of_ranges(space=RANGES):
    return logistic(space, n_trials=2)


def of_functions(space=lambda trial: {"C": trial.suggest_float("C", 0.5, 1.0)}):
    return logistic(space, n_trials=2)


DRAWN = {"C": [0.5, 1.0], "tol": lambda trial: 1e-3}
REFUSED = [  # a search, what is changed, and what the message names
    (of_nets, {"module": Linear}, "module"),
    (of_nets, {"module__hidden_layer_sizes": (8,)}, "module__hidden_layer_sizes"),
    (of_nets, {"callbacks": [StopAtLoss(0.1)]}, "callbacks"),
    (of_nets, {"random_state": 3}, "random_state"),
    (of_scaled_nets, {"batch_size": 64}, "batch_size"),
    (of_pipelines, {"logisticregression__tol": 0.1}, "logisticregression__tol"),
    (of_pipelines, {"standardscaler": "passthrough"}, "standardscaler"),
    (of_pipelines, {"estimator": make_pipeline(LogisticRegression(max_iter=1000))}, "steps"),
    (logistic, {"random_state": None}, "search random_state"),
    (logistic, {"goal": 0.9}, "search goal"),
    (logistic, {"measure": "l2_norm"}, "search objectives"),
    (logistic, {"measure": FlatnessScorer(layer=0)}, "measure relative_flatness"),
    (logistic, {"measure": FlatnessScorer(measure_params={"rtol": 1.0})}, "measure relative_fl"),
    (logistic, {"space": {"C": [0.5, 1.0, 2.0]}, "n_trials": 2}, "space C"),
    (logistic, {"space": {"C": FloatDistribution(0.5, 1.0)}, "n_trials": 2}, "space C"),
    (logistic, {"space": DRAWN, "n_trials": 2}, "space tol: nothing then"),
    (of_ranges, {"space": {"C": FloatDistribution(0.5, 1.0, log=True)}}, "space C"),
    (of_ranges, {"space": {"C": FloatDistribution(0.5, 1.0)}}, "space tol: .* nothing now"),
    (of_ranges, {"space": {**RANGES, "tol": lambda trial: 1e-5}}, "space tol"),
    (of_functions, {"space": lambda trial: {"C": 0.5}}, "space : "),
]


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """A function that makes a search, stores its study once, and returns where."""
    folder = tmp_path_factory.mktemp("studies")

    @cache
    def store(make):
        stored = {"storage": folder / f"{make.__name__}.log", "study_name": "sweep"}
        make().set_params(**stored).fit(X, Y)
        return stored

    return store


@pytest.mark.filterwarnings("ignore:no candidate converged")
@pytest.mark.filterwarnings("ignore:.* candidates are no minima")
@pytest.mark.parametrize(("make", "changed", "match"), REFUSED)
def test_what_changes_results_is_refused(studies, make, changed, match):
    stored = studies(make)
    with pytest.raises(ValueError, match=match) as caught:
        make(**changed).set_params(**stored).fit(X, Y)
    assert "study 'sweep' was made " in str(caught.value)
    assert "study_name" in str(caught.value)
    assert len(load(stored).trials) == 2


@pytest.mark.parametrize(
    ("data", "name"),
    [((X + 1, Y), "X"), ((X, Y[::-1]), "y"), ((X, Y, X_TEST[:9], Y_TEST[:9]), "X_test")],
)
def test_other_data_are_refused(stored, data, name):
    logistic(**stored).fit(X, Y, X_TEST, Y_TEST)
    with pytest.raises(ValueError, match=rf"\n  {name}: .* then, .* now"):
        logistic(**stored).fit(*data)


@pytest.mark.parametrize("now", [(0.1, 5.0), (2.0, 3.0)], ids=["wider", "elsewhere"])
def test_a_range_may_change_and_trials_stay_what_they_are(stored, now):
    logistic({"C": FloatDistribution(0.5, 1.0)}, n_trials=2, **stored).fit(X, Y)
    found = logistic({"C": FloatDistribution(*now)}, n_trials=3, refit=False, **stored).fit(X, Y)
    assert len(found.minima_) == 3
    for trial, params in zip(found.study_.trials, found.cv_results_["params"], strict=True):
        assert params == trial.params
        assert params["C"] == found.get_estimator(trial.number).C


@pytest.mark.filterwarnings("ignore:no candidate converged")
@pytest.mark.filterwarnings("ignore:.* candidates are no minima")
def test_edits_arguments_of_fit_and_choices_of_the_same_name_are_refused(stored, monkeypatch):
    of_nets(module=Linear).set_params(**stored).fit(X, Y, epochs=2)
    with pytest.raises(ValueError, match="fit epochs: 2 then, 3 now"):
        of_nets(module=Linear).set_params(**stored).fit(X, Y, epochs=3)
    source = inspect.getsource(Linear)
    monkeypatch.setattr(
        inspect, "getsource", lambda code: source + "# edited" if code is Linear else str(code)
    )
    with pytest.raises(ValueError, match="module: Linear .* then, Linear"):
        of_nets(module=Linear).set_params(**stored).fit(X, Y, epochs=2)
    stored["study_name"] = "choices"
    stopping(0.6).set_params(**stored).fit(X, Y)
    with pytest.raises(ValueError, match="space callbacks: "):
        stopping(0.7).set_params(**stored).fit(X, Y)


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (logistic(), logistic(verbose=1)),
        (logistic(), logistic(sampler=RandomSampler(seed=0), n_trials=4)),
        (logistic(), logistic(pruner=optuna.pruners.MedianPruner())),
        (logistic(), logistic(estimator=LogisticRegression(max_iter=1000, C=5.0))),
        (of_pipelines(), of_pipelines(logisticregression__C=7.0)),
    ],
    ids=["verbose", "sampler", "pruner", "in the space", "in a pipeline"],
)
def test_what_does_not_change_results_goes_on(stored, first, again):
    trials = first.set_params(**stored).fit(X, Y).study_.trials
    assert again.set_params(**stored).fit(X, Y).study_.trials[:2] == trials


def test_held_out_data_and_measures_that_come_later(kept):
    logistic(**kept).fit(X, Y)
    both = ["relative_flatness", "l2_norm"]
    later = logistic(measure=both, **kept).fit(X, Y, X_TEST, Y_TEST)
    assert len(later.study_.trials) == 2
    whole = logistic(measure=both).fit(X, Y, X_TEST, Y_TEST).minima_
    for name in ("l2_norm", "test_loss", "generalization_gap", "test_score", "train_score"):
        np.testing.assert_allclose(later.minima_[name], whole[name], rtol=1e-6)
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
    assert table["test_loss"].isna().tolist() == [True, True, False]
    assert table["l2_norm"].isna().tolist() == [True, True, False]
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
    def objective(**parameters):
        return MinimaObjective(LogisticRegression(max_iter=1000, **parameters), X, Y, {"C": [0.1]})

    study = optuna.create_study(storage=f"sqlite:///{tmp_path / 'minima.db'}")
    study.optimize(objective(), n_trials=2)
    study.optimize(objective(), n_trials=1)
    with pytest.raises(ValueError, match="tol: 0.0001 then, 0.1 now"):
        study.optimize(objective(tol=0.1), n_trials=1)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 3 + ["FAIL"]
    assert "failed" not in study.trials[-1].user_attrs


class OwnDataset(Dataset):
    def __init__(self, *tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, row):
        return tuple(tensor[row] for tensor in self.tensors)


def record_of(data):
    """Record a study of data in any form, and return it."""
    net = make_net(module=Linear, module__n_features=4, module__n_outputs=3)
    study = optuna.create_study()
    objective = MinimaObjective(net, data, Y, {"lr": [0.1]})
    objective.recipe.check_study(study)
    return study.user_attrs[MADE_WITH]["X"]


FORMS = {
    "subset": lambda X, Y: Subset(TensorDataset(torch.cat([X, X]), torch.cat([Y, Y])), range(75)),
    "loader": lambda X, Y: DataLoader(TensorDataset(X, Y), batch_size=75),
    "skorch": SkorchDataset,
    "own": OwnDataset,  # by a few samples
    "tuple": lambda X, Y: (X, X),
}


@pytest.mark.parametrize("form", FORMS)
def test_data_in_any_form_are_known_by_their_contents(form):
    labels = torch.from_numpy(Y)
    one, again, other = (
        record_of(FORMS[form](torch.from_numpy(X) + add, labels)) for add in (0, 0, 1)
    )
    assert one == again != other


def linear(seed):
    torch.manual_seed(seed)
    return nn.Linear(2, 3)


class Scaled:
    def __init__(self, factor):
        self.factor, self.other = factor, object()


def two(x):
    return 2 * x


def three(x):
    return 3 * x


# fmt: off
SAME_AND_OTHER = {
    "function": (two, two, three),
    "partial": [functools.partial(max, n) for n in (1, 1, 2)],
    "object": (Scaled(2), Scaled(2), Scaled(3)),
    "weights": (linear(0), linear(0), linear(1)),
    "RandomState": [np.random.RandomState(seed) for seed in (1, 1, 2)],
    "long": [[*range(1000), last] for last in (1, 1, 2)],
    **{f"data {n}": [make(x) for x in (1, 1, 2)] for n, make in enumerate((
        lambda value: np.array(["a", str(value)], dtype=object),
        lambda value: torch.tensor([1.0, value], dtype=torch.bfloat16),
        lambda value: sparse.csr_array([[0.0, value]]),
        lambda value: pd.DataFrame({"a": [1.0, value]}),
        lambda value: {"a": np.array([value]), "b": [1]},
        lambda value: np.array([1.0, 2.0, value, 4.0])[::2],
    ))},
}
# fmt: on


def test_descriptions_are_equal_if_training_is_also_in_another_process():
    elsewhere = Parallel(2)(delayed(describe)(same) for _, same, _ in SAME_AND_OTHER.values())
    for (one, _, other), same in zip(SAME_AND_OTHER.values(), elsewhere, strict=True):
        assert describe(one) == same != describe(other)
        assert len(same) < 230


def test_what_cannot_be_pickled_is_said():
    class Slotted:
        __slots__ = ()

        def __reduce_ex__(self, protocol):
            raise RuntimeError("the connection is open")

    with pytest.warns(FlatnessWarning, match=r"Slotted.*\(RuntimeError: the connection is open\)"):
        describe(Slotted())

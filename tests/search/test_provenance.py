"""Tests of resumed studies: what changes results is refused, what does not goes on."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import optuna
import pytest
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import TrialState
from scipy import sparse, special
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler, scale
from skorch.callbacks import EpochTimer, LRScheduler
from skorch.dataset import Dataset as SkorchDataset
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from relflat_sk import (
    MLP,
    FlatMinimaSearch,
    FlatnessWarning,
    MinimaObjective,
    RelativeFlatnessRegularizedClassifier,
    StopAtLoss,
)
from relflat_sk.search._provenance import (
    MADE_WITH,
    check_made_with,
    describe,
    digest,
)
from tests.contracts.pages import blocks

X, Y = load_iris(return_X_y=True)
X = scale(X).astype(np.float32)
X, X_TEST, Y, Y_TEST = X[::2], X[1::2], Y[::2], Y[1::2]


class Linear(nn.Module):
    def __init__(self, n_features=4, n_outputs=3, hidden_layer_sizes=()):
        super().__init__()
        self.layer = nn.Linear(n_features, n_outputs)

    def forward(self, x):
        return self.layer(x)


def make_net(**parameters):
    defaults = {
        "flatness_weight": 0,
        "module__hidden_layer_sizes": (4,),
        "max_epochs": 2,
        "lr": 0.05,
        "callbacks": [StopAtLoss(0.5)],
        "verbose": 0,
    }
    return RelativeFlatnessRegularizedClassifier(**{**defaults, **parameters})


def make_pipe(**parameters):
    pipe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    return pipe.set_params(**parameters)


@pytest.fixture
def stored(tmp_path):
    return {"storage": f"sqlite:///{tmp_path / 'minima.db'}", "study_name": "sweep"}


def logistic(space=None, estimator=None, **parameters):
    estimator = LogisticRegression(max_iter=1000) if estimator is None else estimator
    space = {"C": [0.1, 1.0]} if space is None else space
    return FlatMinimaSearch(
        estimator, space, **{"random_state": 0, "depth_band": None, **parameters}
    )


def of_nets(estimator, space=None, **parameters):
    space = {"batch_size": [16, 32]} if space is None else space
    return FlatMinimaSearch(estimator, space, random_state=0, refit=False, **parameters)


# -- refused -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:no candidate converged")
@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"module": Linear}, r"estimator, module: the default then, Linear \(source \w+\) now"),
        (
            {"module__hidden_layer_sizes": (8,)},
            r"module__hidden_layer_sizes: \[4\] then, \[8\] now",
        ),
        ({"callbacks": [StopAtLoss(0.1)]}, r"callbacks: .*StopAtLoss\(loss=0.5\)\] then, .*0\.1"),
        ({"optimizer": torch.optim.SGD}, "optimizer: the default then, torch.SGD now"),
        ({"flatness_weight": 0.1}, "flatness_weight: 0 then, the default now"),
        ({"random_state": 3}, "random_state: the default then, 3 now"),
    ],
)
def test_another_net_is_refused(stored, changed, match):
    of_nets(make_net(), **stored).fit(X, Y)
    with pytest.raises(ValueError, match=match) as caught:
        of_nets(make_net(**changed), **stored).fit(X, Y)
    assert "study 'sweep' was made with something else" in str(caught.value)
    assert "Give this call a study_name of its own" in str(caught.value)
    (line,) = [line for line in str(caught.value).split("\n") if " then, " in line]
    assert line.startswith("  estimator, ")


def test_the_module_that_was_edited_is_refused(stored, monkeypatch):
    with pytest.warns(FlatnessWarning, match="no candidate converged"):
        of_nets(make_net(module=Linear, max_epochs=1), **stored).fit(X, Y)

    def forward(self, x):
        return 2 * self.layer(x)

    monkeypatch.setattr(Linear, "forward", forward)
    with pytest.raises(ValueError, match=r"module: Linear \(source \w+\) then, Linear \(source"):
        of_nets(make_net(module=Linear, max_epochs=1), **stored).fit(X, Y)


@pytest.mark.parametrize(
    ("estimator", "match"),
    [
        (make_pipe(standardscaler__with_mean=False), "estimator, standardscaler__with_mean: the"),
        (make_pipe(logisticregression__tol=0.1), "estimator, logisticregression__tol: the"),
        (make_pipe(standardscaler="passthrough"), "estimator, standardscaler: sklearn.Standard"),
        (
            make_pipeline(LogisticRegression(max_iter=1000)),
            r"steps: \['standardscaler', 'logisticregression'\] then, \['logisticregression'\] now",
        ),
    ],
)
def test_another_step_of_a_pipeline_is_refused(stored, estimator, match):
    space = {"logisticregression__C": [0.1, 1.0]}
    logistic(space, make_pipe(), **stored).fit(X, Y)
    logistic(space, make_pipe(logisticregression__C=7.0), **stored).fit(X, Y)  # is in the space
    with pytest.raises(ValueError, match=match):
        logistic(space, estimator, **stored).fit(X, Y)


@pytest.mark.parametrize(
    ("search", "data", "match"),
    [
        (logistic(), (X + 1, Y), r"data, X: \(75, 4\) \w+ then, \(75, 4\) \w+ now"),
        (logistic(), (X, Y[::-1]), r"data, y: \(75,\) \w+ then"),
        (logistic(), (X, Y, X_TEST[:9], Y_TEST[:9]), r"held-out data, X_test: \(75, 4\) \w+ then"),
        (logistic(random_state=1), (X, Y), r"search, random_state: \d+ then, \d+ now"),
        (logistic(random_state=None), (X, Y), r"search, random_state: \d+ then, the default now"),
        (logistic(goal=0.9), (X, Y), "search, goal: the default then, 0.9 now"),
        (logistic(measure="l2_norm"), (X, Y), r"measure: \['relative_flatness'\] then, \['l2_norm"),
    ],
)
def test_other_data_seeds_and_measures_are_refused(stored, search, data, match):
    logistic(**stored).fit(X, Y, X_TEST, Y_TEST)
    with pytest.raises(ValueError, match=match):
        search.set_params(**stored).fit(*data)


def test_scaled_learning_rates_are_those_of_the_same_batch_size(stored):
    space = {"batch_size": [8, 16]}
    of_nets(make_net(max_epochs=9), space, lr_scaling="linear", **stored).fit(X, Y)
    with pytest.raises(ValueError, match="batch_size: the default then, 64 now"):
        of_nets(make_net(max_epochs=9, batch_size=64), space, lr_scaling="linear", **stored).fit(
            X, Y
        )
    with pytest.raises(ValueError, match="lr_scaling: 'linear' then, the default now"):
        of_nets(make_net(max_epochs=9), space, **stored).fit(X, Y)


@pytest.mark.filterwarnings("ignore:.* candidates are no minima")
def test_choices_of_the_same_name_with_other_parameters_are_refused(stored):
    """Optuna knows an object by a label only."""

    class Stop(StopAtLoss):
        def __repr__(self):
            return "stop"

    def search(goal, **parameters):
        return of_nets(make_net(max_epochs=20), {"callbacks": [[Stop(goal)], None]}, **parameters)

    search(0.6, **stored).fit(X, Y)
    with pytest.raises(ValueError, match=r"choices, callbacks=\[stop\]: \[Stop.*0\.6\)\] then"):
        search(0.7, **stored).fit(X, Y)


# -- goes on -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: logistic(verbose=1),
        lambda: logistic(sampler=RandomSampler(seed=0), n_trials=4),
        lambda: logistic(pruner=optuna.pruners.MedianPruner()),
        lambda: logistic({"C": [1.0, 0.1]}),
        lambda: logistic(estimator=LogisticRegression(max_iter=1000, C=5.0)),
    ],
    ids=["verbose", "sampler", "pruner", "order", "in the space"],
)
def test_what_does_not_change_results_goes_on(stored, make):
    first = logistic(**stored).fit(X, Y).study_.trials
    again = make().set_params(**stored).fit(X, Y)
    assert again.study_.trials[:2] == first


def test_callbacks_that_only_log_do_not_matter(stored):
    of_nets(make_net(max_epochs=20), **stored).fit(X, Y)
    noisy = make_net(max_epochs=20, callbacks=[StopAtLoss(0.5), EpochTimer()], verbose=1)
    assert len(of_nets(noisy, **stored).fit(X, Y).study_.trials) == 2


@pytest.mark.parametrize("n_trials", [False, True], ids=["grid", "draws"])
def test_choices_can_be_added_in_a_journal(tmp_path, n_trials):
    parameters = {"storage": tmp_path / "minima.log", "study_name": "sweep"}
    first = logistic(n_trials=2 if n_trials else None, **parameters).fit(X, Y).study_.trials
    wider = {"C": [5.0, 0.1, 0.01, 1.0]}
    wide = logistic(wider, n_trials=4 if n_trials else None, **parameters).fit(X, Y)
    assert [trial.params for trial in wide.study_.trials[:2]] == [one.params for one in first]
    alone = logistic(wider).fit(X, Y)
    columns = ["param_C", "relative_flatness", "train_loss", "rank"]
    assert wide.minima_[columns].equals(alone.minima_[columns])
    with pytest.raises(ValueError, match="choices can be added, but not removed"):
        logistic(**parameters).fit(X, Y)


@pytest.mark.parametrize(
    ("name", "sampler", "further"),
    [
        ("minima.db", None, {}),
        ("minima.log", None, {"tol": FloatDistribution(1e-5, 1e-4)}),
        ("minima.log", TPESampler(seed=0), {}),
    ],
    ids=["database", "range", "sampler"],
)
def test_a_study_is_copied_to_add_choices(tmp_path, name, sampler, further):
    """Elsewhere, Optuna takes no further choices; the copy is made as docs/searching.md says."""
    parameters = {"storage": tmp_path / name, "sampler": sampler}
    space = {"C": [0.1, 1.0], **further}
    old = logistic(space, n_trials=2, study_name="old", **parameters).fit(X, Y)
    wider = {**space, "C": [5.0, 0.1, 1.0]}
    more = logistic(wider, n_trials=3, study_name="old", **parameters)
    with pytest.raises(ValueError, match=r"fewer choices for \['C'\] than this space.*copy its"):
        more.fit(X, Y)
    (code,) = (one for one in blocks("docs/searching.md") if "add_trial(" in one)
    wide = {"C": CategoricalDistribution([0.1, 1.0, 5.0])}
    exec(code, {"old": old.study_, "wide": wide, "storage": f"sqlite:///{tmp_path / 'wide.db'}"})
    more.set_params(storage=tmp_path / "wide.db", study_name="wide").fit(X, Y)
    before, after = (search.study_.trials for search in (old, more))
    assert [t.values for t in after[:2]] == [t.values for t in before]
    assert len(after) == len(before) + 1


# -- measured later ----------------------------------------------------------------------------


def test_held_out_data_and_measures_that_come_later(stored, tmp_path):
    parameters = {"artifact_store": tmp_path / "minima", **stored}
    logistic(**parameters).fit(X, Y)
    both = ["relative_flatness", "l2_norm"]
    later = logistic(measure=both, **parameters).fit(X, Y, X_TEST, Y_TEST)
    assert len(later.study_.trials) == 2
    whole = logistic(measure=both).fit(X, Y, X_TEST, Y_TEST).minima_
    for name in ("l2_norm", "test_loss", "generalization_gap", "test_score", "train_score"):
        np.testing.assert_allclose(later.minima_[name], whole[name], rtol=1e-6)
    assert later.best_score_ == -whole["relative_flatness"][0]
    # a session without them goes on, and what they are stays known
    assert logistic(**parameters).fit(X, Y).minima_["test_loss"].equals(later.minima_["test_loss"])
    with pytest.raises(ValueError, match="held-out data, X_test: "):
        logistic(**parameters).fit(X, Y, X_TEST[::-1], Y_TEST)


def test_without_weights_nan_is_explained(tmp_path):
    stored = {"storage": tmp_path / "minima.log", "study_name": "sweep"}
    logistic(**stored).fit(X, Y)
    search = logistic({"C": [0.1, 1.0, 5.0]}, measure=["relative_flatness", "l2_norm"], **stored)
    with pytest.warns(FlatnessWarning, match=r"l2_norm, test_loss of trials \[0, 1\] stay nan"):
        search.fit(X, Y, X_TEST, Y_TEST)
    table = search.minima_.set_index("trial").sort_index()
    assert table["test_loss"].isna().tolist() == [True, True, False]
    assert table["l2_norm"].isna().tolist() == [True, True, False]
    assert table["relative_flatness"].notna().all()


# -- records -----------------------------------------------------------------------------------


def test_a_study_of_an_earlier_version_is_taken_over(stored):
    search = logistic(**stored).fit(X, Y)
    record = search.study_.user_attrs[MADE_WITH]
    search.study_.set_user_attr(MADE_WITH, {})
    with pytest.warns(FlatnessWarning, match="The search takes them to be made by this estimator"):
        again = logistic(**stored).fit(X, Y)
    assert len(again.study_.trials) == 2
    assert again.study_.user_attrs[MADE_WITH] == record
    logistic(**stored).fit(X, Y)  # without a warning


@pytest.mark.filterwarnings("ignore:test_loss of trials")
def test_a_study_of_a_later_version_goes_on(stored):
    """A later version may record more."""
    search = logistic(**stored).fit(X, Y)
    record = search.study_.user_attrs[MADE_WITH]
    search.study_.set_user_attr(MADE_WITH, record | {"compiler": {"name": "new"}})
    again = logistic(**stored).fit(X, Y, X_TEST, Y_TEST).study_
    assert len(again.trials) == 2
    assert again.user_attrs[MADE_WITH]["compiler"] == {"name": "new"}


def test_a_study_without_minima_can_be_of_anything(stored):
    """A slip, such as a wrong X, binds nobody before there is a minimum."""
    study = optuna.create_study(**stored)
    study.set_user_attr(MADE_WITH, {"data": {"X": "something else"}})
    study.add_trial(optuna.trial.create_trial(state=TrialState.FAIL))  # cut short
    search = logistic(**stored).fit(X, Y)
    assert search.study_.user_attrs[MADE_WITH]["data"]["X"] != "something else"


class OwnDataset(Dataset):
    def __init__(self, *tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, row):
        return tuple(tensor[row] for tensor in self.tensors)


def record_of(data, **parameters):
    """Record a study of data in any form, and return it."""
    net = make_net(module=Linear, module__n_features=4, module__n_outputs=3)
    study = optuna.create_study()
    check_made_with(study, MinimaObjective(net, data, Y, {"lr": [0.1]}, **parameters))
    return study.user_attrs[MADE_WITH]["data"]


FORMS = {
    "tensors": lambda X, Y: TensorDataset(X, Y),
    "subset": lambda X, Y: Subset(TensorDataset(torch.cat([X, X]), torch.cat([Y, Y])), range(75)),
    "loader": lambda X, Y: DataLoader(TensorDataset(X, Y), batch_size=75),
    "skorch": lambda X, Y: SkorchDataset(X, Y),
    "own": lambda X, Y: OwnDataset(X, Y),  # by a few samples
    "tuple": lambda X, Y: (X, X),
}


@pytest.mark.parametrize("form", FORMS)
def test_data_in_any_form_are_known_by_their_contents(form):
    one, again, other = (
        record_of(FORMS[form](torch.from_numpy(X) + add, torch.from_numpy(Y)))["X"]
        for add in (0, 0, 1)
    )
    assert one == again != other


class Noisy(OwnDataset):
    def __getitem__(self, row):
        x, y = super().__getitem__(row)
        return x + float(torch.rand(1)[0] < 0.5), y


def test_data_sets_of_random_samples_are_known_by_their_length():
    drawn = []
    for kind in (OwnDataset, Noisy):
        torch.manual_seed(0)
        found = record_of(kind(torch.from_numpy(X), torch.from_numpy(Y)))["X"]
        drawn.append(float(torch.rand(())))
    assert found == "Noisy of length 75"
    assert drawn[0] == drawn[1]  # random states are given back


class Closed(OwnDataset):
    def __getitem__(self, row):
        raise OSError("the file is closed")


def test_data_sets_that_cannot_be_read_are_known_by_their_length():
    assert record_of(Closed(torch.from_numpy(X)))["X"] == "Closed of length 75"


def test_other_arguments_of_fit_are_refused(stored):
    def search():
        return of_nets(make_net(max_epochs=20, callbacks=None), {"batch_size": [16]}, **stored)

    with pytest.warns(FlatnessWarning, match="no candidate converged"):
        search().fit(X, Y, epochs=2)
    with pytest.raises(ValueError, match="data, epochs: 2 then, 3 now"):
        search().fit(X, Y, epochs=3)


# -- the objective in a study of one's own -----------------------------------------------------


def test_the_objective_refuses_a_study_of_something_else(stored):
    def objective(**parameters):
        return MinimaObjective(LogisticRegression(max_iter=1000, **parameters), X, Y, {"C": [0.1]})

    study = optuna.create_study(**stored)
    first = objective()
    study.optimize(first, n_trials=2)
    assert study.user_attrs[MADE_WITH]["search"] == {"measure": "['relative_flatness']"}
    again = optuna.load_study(**stored)
    again.optimize(objective(), n_trials=1)
    with pytest.raises(ValueError, match="tol: the default then, 0.1 now"):
        again.optimize(objective(tol=0.1), n_trials=1)
    assert [trial.state.name for trial in again.trials] == ["COMPLETE"] * 3 + ["FAIL"]
    assert "failed" not in again.trials[-1].user_attrs


# -- descriptions ------------------------------------------------------------------------------

VALUES = """
import functools, sys
import numpy as np
from sklearn.preprocessing import FunctionTransformer
from skorch import NeuralNetClassifier
from skorch.callbacks import EarlyStopping
from torch import nn
from relflat_sk import MLP, StopAtLoss
from relflat_sk.search._provenance import describe

class Own:
    def __init__(self):
        self.sizes, self.names, self.other = {3, 1, 2}, {"a", "b", "c"}, object()

print(describe([
    Own(), {"b": 1, "a": {"x", "y", "z"}}, functools.partial(sorted, key=len), np.log1p,
    np.random.RandomState(3), [StopAtLoss(0.2), ("stop", EarlyStopping(patience=2))],
    FunctionTransformer(np.log1p), NeuralNetClassifier(MLP, criterion=nn.CrossEntropyLoss),
    lambda trial: 1, np.arange(6).reshape(2, 3), slice(2), float("nan"),
]))
"""


def test_every_process_finds_the_same():
    """Hashes of Python are seeded in each process, and addresses differ."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    found = {
        subprocess.run(
            [sys.executable, "-c", VALUES],
            env={**environment, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    (text,) = found
    assert " at 0x" not in text
    assert "(names={'a', 'b', 'c'}, other=builtins.object(" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float32(0.5), "0.5"),
        ((4, [8]), "[4, [8]]"),
        (MLP, "relflat_sk.MLP"),
        (torch.optim.Adam, "torch.Adam"),
        (
            functools.partial(max, 1),
            "functools.partial(arguments=[builtins.max], state=[builtins.max, [1], {}, {}])",
        ),
        ([StopAtLoss(0.1), EpochTimer()], "[relflat_sk.StopAtLoss(loss=0.1)]"),
        (LRScheduler(policy="StepLR", step_size=3), None),
        (LogisticRegression(C=2.0, verbose=3, n_jobs=2), "sklearn.LogisticRegression(C=2.0)"),
        (FunctionTransformer(np.log1p), "sklearn.FunctionTransformer(func=numpy.log1p)"),
        (special.expit, "numpy.expit"),
        (StopAtLoss(0.1).on_epoch_end, "relflat_sk.StopAtLoss(loss=0.1).on_epoch_end"),
    ],
)
def test_descriptions(value, text):
    found = describe(value)
    assert found == describe(value)
    assert text is None or found == text


class First(nn.Module):
    width = 4

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)


class Changed(nn.Module):
    width = 4

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x).relu()


class Wider(First):
    width = 5


def test_an_edit_of_the_module_is_noticed():
    found = {describe(kind).partition(" (source ")[2] for kind in (First, Changed, Wider)}
    assert len(found) == 3
    assert {len(text) for text in found} == {9}


def test_code_without_a_source_has_a_name():
    scope = {"__name__": "made"}
    exec("def double(x):\n    return 2 * x\nclass Made:\n    def run(self): pass", scope)
    assert describe(scope["double"]) == "double"
    assert describe(scope["Made"]) == "Made"


def scaling(factor):
    def scale(x, names=("a", "b")):
        return factor * x

    return scale


def recursive():
    def count(n):
        return 0 if n == 0 else count(n - 1)

    return count


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor, self.layer = factor, nn.Identity()


def linear(seed):
    torch.manual_seed(seed)
    return nn.Linear(2, 3)


# fmt: off
SAME_AND_OTHER = {
    "closure": (scaling(2), scaling(2), scaling(3)),
    "default": [lambda x, factor=factor: factor * x for factor in (2, 2, 3)],
    "lambda": ((lambda x: x + 1), (lambda x:
               x + 1), (lambda x: x + 2)),
    "inner": ((lambda x: lambda: x), (lambda x: lambda: x), (lambda x: lambda: -x)),
    "recursive": (recursive(), recursive(), scaling(1)),
    "numbers of a module": (Scaled(2), Scaled(2).eval(), Scaled(3)),
    "weights": (linear(0), linear(0), linear(1)),
    "layers": (nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh())),
    "RandomState": [np.random.RandomState(seed) for seed in (1, 1, 2)],
    "Generator": [np.random.default_rng(seed) for seed in (1, 1, 2)],
    "torch": [torch.Generator().manual_seed(seed) for seed in (1, 1, 2)],
    "long": [[*range(1000), last] for last in (1, 1, 2)],
    **{f"data {n}": [make(x) for x in (1, 1, 2)] for n, make in enumerate((
        lambda value: np.array([[1.0, value]]),
        lambda value: np.array(["a", str(value)], dtype=object),
        lambda value: torch.tensor([1.0, value]),
        lambda value: torch.tensor([1.0, value], dtype=torch.bfloat16),
        lambda value: sparse.csr_array([[0.0, value]]),
        lambda value: {"a": np.array([value]), "b": [1]},
        lambda value: np.array([1.0, 2.0, value, 4.0])[::2],
        lambda value: np.array([value], dtype="datetime64[D]"),
    ))},
}
# fmt: on


@pytest.mark.parametrize("name", SAME_AND_OTHER)
def test_descriptions_are_equal_if_training_is(name):
    one, same, other = map(describe, SAME_AND_OTHER[name])
    assert one == same != other
    assert len(one) < 330


def test_digests_are_of_numbers_in_any_layout():
    data = np.arange(6.0).reshape(2, 3)
    assert digest(data) == digest(np.asfortranarray(data)) == digest(data.tolist())
    assert digest(np.zeros((0, 3))) is not None
    for other in (None, object(), 3, np.array(3), [[1], [1, 2]]):
        assert digest(other) is None

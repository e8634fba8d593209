"""Tests for `trials`: which trials become rows, and what stands in them."""

import optuna
import pytest
from optuna.trial import TrialState, create_trial

from relflat_sk.minima._table import FIXED, curves_of, minima_table, remeasured_key

UNRANKED = [name for name in FIXED if name not in {"comparable", "rank"}]


def make_study(directions=("minimize",)):
    """A study as a search stores it, with a trial in every state."""
    study = optuna.create_study(directions=directions)
    values = [1.5] * len(directions)
    distributions = {
        "net__lr": optuna.distributions.FloatDistribution(0.0, 1.0),
        "opt": optuna.distributions.CategoricalDistribution(["SGD", "Adam"]),
    }
    params = {"net__lr": 0.1, "opt": "SGD"}
    fine = {
        "relative_flatness": 1.5,
        "param_net__batch_size": "(8, 8)",
        "train_loss": 0.1,
        "test_loss": 0.3,
        "generalization_gap": 0.2,
        "converged": True,
        "seconds": 2,
        "reason": "",
        "seeds": {"net__random_state": 7},
        "artifact": "a1b2",
    }
    shared = {"params": params, "distributions": distributions}
    study.add_trial(create_trial(values=values, user_attrs=fine, **shared))
    study.add_trial(create_trial(state=TrialState.FAIL, user_attrs={"reason": "boom"}, **shared))
    study.add_trial(create_trial(state=TrialState.PRUNED, **shared))
    study.add_trial(create_trial(state=TrialState.FAIL, **shared))
    study.add_trial(create_trial(state=TrialState.RUNNING, **shared))
    study.add_trial(create_trial(state=TrialState.WAITING))
    return study


@pytest.mark.parametrize("directions", [("minimize",), ("minimize", "maximize")])
def test_study_becomes_a_table_of_its_finished_trials(directions):
    table = minima_table(make_study(directions))
    assert table["trial"].tolist() == [0, 1, 2, 3]
    assert table["state"].tolist() == ["complete", "failed", "pruned", "failed"]
    assert table["reason"].tolist() == [
        "",
        "boom",
        "stopped by the pruner",
        "failed without a recorded reason",
    ]
    assert table["converged"].tolist() == [True, False, False, False]
    assert table.columns.tolist() == [
        "trial",
        "param_net__lr",
        "param_opt",
        "param_net__batch_size",
        "relative_flatness",
        *UNRANKED[1:],
    ]
    first = table.iloc[0]
    assert first["param_net__batch_size"] == "(8, 8)"
    assert first["seconds"] == 2.0
    assert first["generalization_gap"] == 0.2
    assert table["train_score"].isna().all()


def test_study_without_trials_becomes_an_empty_table():
    table = minima_table(optuna.create_study())
    assert len(table) == 0
    assert table.columns.tolist() == UNRANKED


def test_measures_computed_afterwards_join_the_row_of_their_trial():
    study = make_study()
    study.set_user_attr(remeasured_key(study.trials[0]), {"l2_norm": 4.0})
    assert minima_table(study).loc[0, ["relative_flatness", "l2_norm"]].tolist() == [1.5, 4.0]


def test_curves_are_in_studies_and_fitted_searches():
    study = make_study()
    study.add_trial(create_trial(values=[1.0], user_attrs={"curves": {"epoch": [1.0]}}))
    search = type("Search", (), {"study_": study})
    assert curves_of(study) == curves_of(search) == {6: {"epoch": [1.0]}}
    with pytest.raises(TypeError, match="curves are in an optuna.Study .* got int"):
        curves_of(3)

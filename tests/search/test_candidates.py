"""What is left of many candidates."""

import optuna
import pytest
from optuna.trial import TrialState, create_trial

from relflat_sk.search._sharing.candidates import Draws, Grid

N = 200


class Counting(int):
    """A number that counts how often numbers are compared."""

    n_compared = 0

    def __eq__(self, other):
        Counting.n_compared += 1
        return int(self) == other

    __hash__ = int.__hash__


PLANS = {
    "grid": (Grid, "fixed_params", lambda n: {"C": Counting(n)}),
    "draws": (Draws, "candidate", Counting),
}


@pytest.mark.parametrize("kind", PLANS)
def test_the_work_does_not_grow_with_the_square_of_the_number_of_candidates(kind):
    make, attribute, candidate = PLANS[kind]
    done = [
        create_trial(state=TrialState.RUNNING, system_attrs={attribute: candidate(n)})
        for n in range(N - 1)
    ]
    plan = make([candidate(n) for n in range(N)] if kind == "grid" else N)
    Counting.n_compared = 0
    assert plan.n_left(done) == 1
    assert plan.next_candidate(optuna.create_study(), done) == {attribute: candidate(N - 1)}
    assert Counting.n_compared < 10 * N

"""Two processes with uneven parts of the data find the values of one process with all data."""

import pickle

import numpy as np
import pytest
from numpy.testing import assert_allclose
from pandas.testing import assert_frame_equal

from relflat_sk import relative_flatness
from relflat_sk._network import processes
from relflat_sk._random import draw_seeds
from tests.measures import shards
from tests.processes import forkserver

ALL = slice(None)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    running = [forkserver().Process(target=shards.main, args=(rank, folder)) for rank in (0, 1)]
    for process in running:
        process.start()
    for process in running:
        process.join()
    assert [process.exitcode for process in running] == [0, 0]
    return [pickle.loads((folder / f"{rank}.pkl").read_bytes()) for rank in (0, 1)]


REPORTS = {
    "tanh": lambda: shards.report("tanh", ALL),
    "relu": lambda: shards.report("relu", ALL),
    "weighted": lambda: shards.weighted(ALL),
    "equal loss": lambda: shards.at_equal_loss(ALL),  # at the temperature of all data
}


@pytest.mark.parametrize("what", REPORTS)
def test_all_measures_and_their_errors_are_those_of_one_process(found, what):
    expected = REPORTS[what]()
    for one in found:
        # the residual of an eigenvalue is a difference that rounding alone can be
        assert_frame_equal(one[what], expected, rtol=1e-10, atol=1e-10)


def test_scores_and_the_comparison_with_a_constant(found):
    expected, expected_warnings = shards.score(shards.Y, ALL)
    for value, warnings in (one["scores"] for one in found):
        assert_allclose(value, expected, rtol=1e-10)
        assert warnings == expected_warnings


def test_a_network_that_is_no_minimum(found):
    for value, warnings in (one["no minimum"] for one in found):
        assert value < 0
        assert "not at a minimum" in warnings[0]
    assert found[0]["no minimum"] == found[1]["no minimum"]


def test_random_probes_are_pooled(found):
    """The samples of each process have probes of their own, so that errors are independent."""
    first, second = shards.SHARDS
    parts = [shards.drawn(first, 5), shards.drawn(second, draw_seeds(5, 1)[0])]
    n = np.array([shards.CUT, shards.N - shards.CUT])
    values, stderrs = np.array(parts).T
    expected = n @ values / n.sum(), np.linalg.norm(n * stderrs) / n.sum()
    for one in found:
        assert_allclose(one["drawn"], expected, rtol=1e-10)


def test_noise_without_a_seed_is_shared(found):
    assert found[0]["unseeded"] == found[1]["unseeded"]


def test_a_group_a_module_of_data_parallelism_and_a_data_loader(found):
    expected = relative_flatness(shards.network("relu"), shards.X, shards.Y, criterion=shards.CE)
    for one in found:
        for value in (one["group"], one["loader"], one["errors"]["afterwards"]):
            assert_allclose(value, expected, rtol=1e-10)


OTHER = "OtherProcessError: process 1 of the group "
DIFFERENT = "ValueError: the processes of process_group hold models with different"
ORDER = "OtherProcessError: the processes of the group do different things: process "


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("one process", OTHER + "has failed: ValueError: y contains NaN", "ValueError: y contains"),
        ("weights", DIFFERENT, None),
        ("permuted", DIFFERENT, None),
        ("buffers", DIFFERENT, None),
        (
            "empty",
            OTHER + "has failed: ValueError: X has no samples",
            "ValueError: X has no samples",
        ),
        ("terms", "ValueError: per_sample=True gives the terms of the samples of one", None),
        ("own", "ValueError: the measure 'own_measure' is a function of yours, which gets", None),
        (
            "order",
            ORDER + "1 is at the step 'begin of fisher_rao_norm', this one at 'begin of l2_norm'",
            ORDER + "0",
        ),
        ("ctrl-c", OTHER + "has failed: KeyboardInterrupt", "KeyboardInterrupt"),
        ("kind", "TypeError: process_group must be a group of torch.distributed, 'world' or", None),
        ("outside", "", "ValueError: process_group is a group that the calling process does"),
    ],
)
def test_errors_reach_all_processes(found, what, first, second):
    said = [one["errors"][what] for one in found]
    assert said[0].startswith(first)
    assert said[1].startswith(first if second is None else second)


def test_after_an_exchange_that_was_interrupted_there_is_no_other(monkeypatch):
    """The others are in its middle, and would take what comes for its end."""
    exchanged = []

    def interrupted(found, value, group):
        exchanged.append(value)
        raise KeyboardInterrupt

    monkeypatch.setattr(processes.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(processes.dist, "all_gather_object", interrupted)
    several = processes.Processes("group")
    with pytest.raises(KeyboardInterrupt), several.together():
        several.begin("a task")
    assert exchanged == [("begin of a task", None)]

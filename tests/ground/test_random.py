"""Seeds, generators and signs."""

import os
import signal
from contextlib import contextmanager
from functools import partial
from threading import Event, Thread

import pytest
import torch

from relflat_sk import _random
from relflat_sk._random import (
    alone,
    fork_rng,
    make_generator,
    rademacher,
    seed_torch,
    seeded,
)


def test_torch_is_seeded_as_by_its_own_function(device):
    drawn = []
    for seed in (torch.manual_seed, seed_torch):
        seed(7)
        drawn.append((torch.rand(3), torch.rand(3, device=device)))
    torch.testing.assert_close(*drawn, rtol=0, atol=0)


def test_signs_are_balanced_independent_and_repeatable():
    generator = make_generator(0, torch.device("cpu"))
    signs = rademacher((3001, 7, 5), torch.zeros((), dtype=torch.float64), generator)
    assert signs.shape == (3001, 7, 5)
    assert signs.dtype == torch.float64
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    rows = signs.flatten(1)
    # 35 variances of 1 and covariances of 0, to five standard errors
    assert (rows.T @ rows / 3001 - torch.eye(35)).abs().max() < 5 / 3001**0.5
    assert rows.mean(dim=0).abs().max() < 5 / 3001**0.5
    again = rademacher((3001, 7, 5), signs, make_generator(0, torch.device("cpu")))
    assert torch.equal(signs, again)


@contextmanager
def held_by_another_thread():
    """Yield a function that lets the thread go."""
    began, end = Event(), Event()

    def hold():
        with alone():
            began.set()
            end.wait()

    thread = Thread(target=hold)
    thread.start()
    began.wait()
    try:
        yield end.set
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("change", [alone, partial(fork_rng, None), partial(seeded, 0)])
def test_a_thread_that_waits_for_long_says_so_and_goes_on_waiting(change, monkeypatch):
    said = []
    with held_by_another_thread() as let_go:
        monkeypatch.setattr(_random, "_PATIENCE", 0.01)
        monkeypatch.setattr(_random, "warn", lambda message: (said.append(message), let_go()))
        with change():
            assert "waited 0.01 s for a fit or a measure in another thread" in said[0]
    with alone(), fork_rng(None):
        assert len(said) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_waits_for_no_thread_of_its_parent():
    with held_by_another_thread():
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # kills a child that waits
            with alone():
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

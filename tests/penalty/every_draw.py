"""The mean of a penalty over everything that it may draw, exactly and from few evaluations.

Each term of an estimate has at most two of the random signs as factors. Its mean is therefore
also that over signs of which any two average to zero together: the columns of a Hadamard matrix,
with a row for each sign of a sample.
"""

import math
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from relflat_sk._penalty import batch_flatness
from relflat_sk._penalty.batch_flatness import n_shared


class Draws:
    """Stand in for what the penalty draws: samples have equal signs, channels and positions."""

    def __init__(self, n_samples, signs=None, channel=0, position=0):
        self.n_samples, self.signs = n_samples, signs
        self.channel, self.position = channel, position
        self.n_signs = 0  # drawn for each sample so far
        self.n_channels, self.n_positions = 1, 1

    def rademacher(self, shape, like):
        if shape[0] % self.n_samples:  # shared by the samples, and as many as there are columns
            return torch.as_tensor(hadamard(shape[0])[:, : shape[1]]).to(like)
        n = math.prod(shape) // self.n_samples
        self.n_signs += n
        if self.signs is None:
            return torch.ones(shape).to(like)
        drawn = np.tile(self.signs[self.n_signs - n : self.n_signs], self.n_samples)
        return torch.as_tensor(drawn).to(like).reshape(shape)

    def randint(self, high, size, **kwargs):
        if not size:
            self.n_positions = math.lcm(self.n_positions, high)
            return torch.tensor(self.position % high)
        self.n_channels = math.lcm(self.n_channels, high)
        return torch.full(size, self.channel % high, **kwargs)

    def n_shared(self, m):
        """Return a power of two, enough for each column of the weight, if signs are shared."""
        return 1 << (m - 1).bit_length() if n_shared(m) else 0

    def run(self, step):
        """Return the penalty that a step computes with these draws."""
        with (
            mock.patch.object(batch_flatness, "rademacher", self.rademacher),
            mock.patch.object(batch_flatness, "n_shared", self.n_shared),
            mock.patch.object(torch, "randint", self.randint),
        ):
            return step()


def mean_of_all_draws(step, n_samples):
    """Return the mean of what a function returns, which evaluates the penalty on a batch."""
    first = Draws(n_samples)
    first.run(step)
    columns = hadamard(1 << (first.n_signs - 1).bit_length()).T  # a power of two, and enough
    draws = product(columns, range(first.n_channels), range(first.n_positions))
    return np.mean([Draws(n_samples, *drawn).run(step) for drawn in draws])


def evaluate(penalty, net, criterion, X, y, seed=0, **options):
    torch.manual_seed(seed)
    with penalty.capture(net):
        output = net(X)
    return penalty(criterion, output, y, **options)


def train(penalty, net, criterion, X, y, n_steps, *, lr=0.1, after_step=lambda: None):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(n_steps):
        optimizer.zero_grad()
        with penalty.capture(net):
            output = net(X)
        (criterion(output, y) + penalty(criterion, output, y)).backward()
        optimizer.step()
        after_step()
    return net


def assert_right_on_average(penalty, net, criterion, X, y, truth, **options):
    """Compare in float64, where both sum the same terms."""

    def step():
        return evaluate(penalty, net, criterion, X, y, **options).item()

    assert mean_of_all_draws(step, len(X)) == pytest.approx(float(truth), rel=1e-10)

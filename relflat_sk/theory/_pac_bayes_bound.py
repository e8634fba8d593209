"""The PAC-Bayes guarantee on the error of a classifier with noise on its weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import rel_entr
from sklearn.pipeline import Pipeline
from sklearn.utils import get_tags
from torch import nn

from relflat_sk._checks import check_integer, check_number, check_probability
from relflat_sk._models.network_of import open_model, unwrap
from relflat_sk._network.batches import count_samples
from relflat_sk._network.borrowing import evaluation_mode
from relflat_sk._network.network import Network
from relflat_sk._random import RandomState, as_random_state, draw_seeds
from relflat_sk.measures._predictions import count_errors
from relflat_sk.measures._sharpness import (
    draw_noise,
    error_rate,
    parameters_of,
    square_norm,
    weights_of,
    with_weights,
)

# from 1e-6 to 8, in factors of the square root of 2; the same for all networks and data
SIGMAS = tuple(2.0 ** (k / 2) for k in range(-40, 7))
# draws by which sigma is chosen; the bound at the chosen one has draws of its own
_TRIALS = 16
# the inequality between the sample and its distribution holds from this number of samples on
_FEWEST = 8


@dataclass(frozen=True)
class PacBayesBound:
    """A bound on the error of a classifier with noise on its weights; errors are shares.

    Parameters
    ----------
    bound : float
        With probability `confidence`, the expected error on new data is at most this.
    confidence : float
        ``1 - delta``.
    sigma : float
        Standard deviation of the noise.
    kl : float
        Divergence from the prior, ``|w - w_0|^2 / (2 sigma^2)``, in nats.
    empirical_error : float
        Error of the network without noise on the sample.
    expected_sharpness : float
        By how much the noise raises the error on the sample, on average over the draws.
    noisy_error : float
        Mean error on the sample with noise, over the draws: the sum of the two.
    noisy_error_limit : float
        Upper confidence limit of the expectation that `noisy_error` estimates.
    mcallester : float
        The bound as equation 5 prints it, with the square root, at the same sigma.
    n_samples : int
        Size of the sample.
    """

    bound: float
    confidence: float
    sigma: float
    kl: float
    empirical_error: float
    expected_sharpness: float
    noisy_error: float
    noisy_error_limit: float
    mcallester: float
    n_samples: int


def pac_bayes_bound(  # noqa: PLR0913
    model: Any,
    X: Any,
    y: Any,
    *,
    initial: nn.Module | Mapping[str, Any] | None = None,
    delta: float = 0.05,
    sigmas: Sequence[float] | None = None,
    n_draws: int = 1000,
    criterion: Any = None,
    batch_size: int = 1024,
    device: Any = None,
    random_state: RandomState = None,
) -> PacBayesBound:
    r"""Bound the error on new data of a classifier with normal noise on its weights.

    The bound is a guarantee. It holds for the classifier that draws new noise for every
    prediction, :math:`f_{w + \nu}` with :math:`\nu \sim N(0, \sigma^2 I)`, and not for the network
    without noise. The majority vote over the noise errs at most twice as often.

    Parameters
    ----------
    model : nn.Module or fitted estimator
        A classifier that `relative_flatness` measures. It predicts the class of the largest
        output, or class 1 where a single logit is positive.
    X : array-like of n samples
        The sample that the model was trained on: drawn independently from the distribution of
        which the error is bounded, 8 samples or more.
    y : array-like of shape (n,)
        One label for each sample.
    initial : nn.Module or mapping of str to Tensor, optional
        The weights before training, as a copy of the module or of its state dict. The prior is
        normal around them; around zero if None. They must not depend on the sample.
    delta : float, default=0.05
        Probability with which the bound may fail, over the draw of the sample and of the noise.
    sigmas : sequence of float, optional
        The noise to choose from; must not be chosen by looking at the sample or the weights. 47
        values between 1e-6 and 8 if None.
    n_draws : int, default=1000
        Draws of noise with which the error on the sample is estimated at the chosen sigma.
    criterion, batch_size, device : optional
        The loss, the samples in one forward pass and where to compute, see `relative_flatness`.
    random_state : int, RandomState or None, default=None
        Decides the noise, which differs from call to call if None.

    Returns
    -------
    PacBayesBound
        Frozen, with `bound` and what it is made of.

    Raises
    ------
    ValueError
        If the model is no classifier, an argument is out of its range, the initial weights do not
        fit or are the trained ones, or the model has buffers that training changed, such as
        batch norm's, or fitted preprocessing: these depend on the sample, and so would the prior.

    See Also
    --------
    generalization_bound : The description of the gap by relative flatness, which is no guarantee.
    sharpness_conditions : The conditions under which sharpness bounds the gap.

    Notes
    -----
    With a prior :math:`P = N(w_0, \sigma^2 I)`, equation 5 of [1]_ bounds the expected error by the
    error on the sample, the expected sharpness and a square root:

    .. math:: \hat L(f_w) + \bigl(E_\nu \hat L(f_{w+\nu}) - \hat L(f_w)\bigr) +
        \sqrt{\frac1n \Bigl(\frac{|w - w_0|^2}{2 \sigma^2} + \ln\frac{2 n}{\delta}\Bigr)} .

    This is `mcallester`. Equation 6 prints it with :math:`w_0 = 0` and :math:`\ln(1 / \delta)`.
    `bound` is the tighter form of [2]_, in which the divergence between coins
    that show the two errors is at most
    :math:`(|w - w_0|^2 / (2 \sigma^2) + \ln(2 \sqrt n / \delta)) / n`; the largest error that
    satisfies it is the bound. Both pay for what was chosen and estimated:

    - Half of `delta` is divided among the sigmas, so that the bound holds at all of them, and also
      at the one where it is smallest.
    - The other half is for the expected error on the sample, which is unknown. `noisy_error_limit`
      is its upper confidence limit from `n_draws` independent draws [3]_, which play no part in the
      choice of sigma.

    Architecture and initial weights must not have been chosen by the sample. Of the data, `bound`
    assumes nothing but independent draws.

    References
    ----------
    .. [1] Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017.
    .. [2] Maurer, "A Note on the PAC Bayesian Theorem", 2004.
    .. [3] Langford and Caruana, "(Not) Bounding the True Error", NeurIPS 2001.

    Examples
    --------
    >>> from sklearn.linear_model import LogisticRegression
    >>> X = np.random.default_rng(0).normal(size=(500, 2))
    >>> y = X[:, 0] > 0
    >>> model = LogisticRegression(C=0.1).fit(X, y)
    >>> found = pac_bayes_bound(model, X, y, n_draws=200, random_state=0)
    >>> found.empirical_error < found.noisy_error < found.bound < 0.5
    True
    """
    check_probability("delta", delta)
    check_integer("n_draws", n_draws, minimum=1)
    grid = list(SIGMAS if sigmas is None else sigmas)
    if not grid:
        raise ValueError("sigmas must hold at least one standard deviation of the noise, got none.")
    for sigma in grid:
        check_number("sigmas", sigma)
    _refuse_preprocessing(model)
    network = open_model(model, X, y, criterion=criterion, batch_size=batch_size, device=device)
    if isinstance(initial, nn.Module):
        initial = dict([*initial.named_parameters(), *initial.named_buffers()])
    weights = weights_of(network)
    _refuse_statistics(network.module, initial or {})
    wrong, labels = count_errors(network)
    n = _check_labels(network, labels)
    with evaluation_mode(network.module):
        square = square_norm(weights) if initial is None else _squared_distance(network, initial)
    rng = as_random_state(random_state)

    # half of delta is shared by the sigmas
    risk = 0.5 * delta / len(grid)
    trials = draw_seeds(rng, _TRIALS)

    def noisy_error(sigma: float, seeds: Sequence[int]) -> float:
        draws = (weights + sigma * draw_noise(weights, seed) for seed in seeds)
        return float(np.mean([error_rate(with_weights(network, noisy)) for noisy in draws]))

    def bound(error: float, sigma: float) -> float:
        kl = square / (2 * sigma**2)
        return kl_inverse(error, (kl + math.log(2 * math.sqrt(n) / risk)) / n)

    smallest, best = math.inf, grid[0]
    for sigma in grid:
        if bound(0.0, sigma) < smallest:
            tried = bound(noisy_error(sigma, trials), sigma)
            smallest, best = min((smallest, best), (tried, sigma))
    error = noisy_error(best, draw_seeds(rng, n_draws))
    limit = kl_inverse(error, math.log(2 / delta) / n_draws)
    kl = square / (2 * best**2)
    return PacBayesBound(
        bound=bound(limit, best),
        confidence=1 - delta,
        sigma=float(best),
        kl=kl,
        empirical_error=wrong / labels,
        expected_sharpness=error - wrong / labels,
        noisy_error=error,
        noisy_error_limit=limit,
        mcallester=limit + math.sqrt((kl + math.log(2 * n / risk)) / n),
        n_samples=n,
    )


def kl_inverse(mean: float, divergence: float) -> float:
    """Return the largest p whose coin diverges from the coin of the mean by no more than given."""
    low, high = mean, 1.0
    # the float64 numbers in [0, 1] have 53 digits
    for _ in range(60):
        middle = (low + high) / 2
        apart = rel_entr(mean, middle) + rel_entr(1 - mean, 1 - middle)
        low, high = (low, middle) if apart > divergence else (middle, high)
    return high


def _refuse_preprocessing(model: Any) -> None:
    """Refuse a pipeline whose steps were fitted: the classifiers would depend on the sample."""
    for pipeline in unwrap(model):
        steps = pipeline.steps[:-1] if isinstance(pipeline, Pipeline) else []
        for name, step in steps:
            if step not in (None, "passthrough") and get_tags(step).requires_fit:
                raise ValueError(
                    f"step {name!r} of the pipeline was fitted to data, on which the prior must "
                    "not depend. Pass the last step, and X transformed by other means."
                )


def _refuse_statistics(module: nn.Module, before: Mapping[str, Any]) -> None:
    """Refuse a network with numbers that are no weights and may depend on the sample."""
    for name, buffer in module.named_buffers():
        same = name in before and torch.equal(buffer.cpu(), torch.as_tensor(before[name]).cpu())
        if buffer.is_floating_point() and not same:
            raise ValueError(
                f"the buffer {name!r} of the network may depend on the sample, and so the prior. "
                "Use a norm without statistics, such as torch.nn.LayerNorm, or pass initial=, the "
                "module from before training, if the buffer has not changed since."
            )


def _check_labels(network: Network, labels: float) -> int:
    """Return the number of labels, if there is at most one for each sample, and enough."""
    samples = sum(count_samples(batch.x) for batch in network.batches())
    if labels > samples:
        raise ValueError(f"{samples} samples have {labels:.0f} labels; the bound takes one each.")
    if labels < _FEWEST:
        raise ValueError(f"the bound needs {_FEWEST} labelled samples or more, got {labels:.0f}.")
    return int(labels)


def _squared_distance(network: Network, before: Mapping[str, Any]) -> float:
    """Sum the squared differences between the weights and the mean of the prior."""
    square = 0.0
    for name, value in parameters_of(network).items():
        if name not in before or tuple(before[name].shape) != tuple(value.shape):
            raise ValueError(
                f"the initial weights do not fit the network: {name} is missing or of another "
                "shape. Pass a copy of the same module, or of its state dict, from before training."
            )
        initial = torch.as_tensor(before[name]).detach().to(value.device)
        square += square_norm(value.double() - initial)
    if square == 0:
        raise ValueError(
            "the initial weights are those of the trained network. Training changes a module and "
            "the tensors of its state_dict() in place: pass a copy.deepcopy from before training."
        )
    return square

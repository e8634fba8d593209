"""Sharpness-aware minimisation, SAM and ASAM, for any skorch net."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from skorch import NeuralNet
from torch import Tensor, nn

from relflat_sk._checks import check_number
from relflat_sk._random import get_states, set_states


class SharpnessAwareMixin(NeuralNet):
    r"""Train a skorch net by SAM, or by its scale-invariant form ASAM.

    Each step takes the gradient not at the weights :math:`w`, but at the point around them
    where the loss of the batch is highest, to first order:

    .. math:: w + \rho \, \frac{T^2 g}{\|T g\|}, \qquad g = \nabla L(w).

    SAM [1]_ has :math:`T = 1`. ASAM [2]_ has :math:`T = |w| + \eta`, element by element. The norm
    is over all parameters. The optimizer then steps from :math:`w`, which is restored bit by bit.

    To use it, put the mixin before the class of a net:
    ``class SAMNet(SharpnessAwareMixin, NeuralNetClassifier): pass``.

    Parameters
    ----------
    *args : object
        Positional arguments of the net.
    sharpness_radius : float, default=0.05
        The radius :math:`\rho`. ASAM needs about ten times the radius of SAM. With 0, a step
        is the plain one at twice the cost.
    sharpness_adaptive : bool, default=False
        Whether to use ASAM instead of SAM.
    sharpness_eta : float, default=0.01
        The :math:`\eta` of ASAM.
    **kwargs : object
        Keyword arguments of the net.

    Raises
    ------
    ValueError
        From `fit`, if a parameter is negative or not finite.

    See Also
    --------
    RelativeFlatnessRegularizedClassifier : Flatness as a penalty, without a second forward pass.
    measure : ``"adaptive_sharpness"`` is one of its names.

    Notes
    -----
    A step makes two forward-backward passes over its batch. The second pass repeats the random
    numbers of the first (dropout masks), as in the authors' code, and leaves the buffers
    (statistics of batch norm) as the first pass made them. The recorded loss is that of the
    first pass. With a flatness penalty, the loss :math:`L` includes the penalty.

    The mixin works with any torch optimizer, with gradient accumulation, clipping and loss
    scaling, and with skorch's accelerate mixin
    (``class Net(SharpnessAwareMixin, AccelerateMixin, ...)``).

    References
    ----------
    .. [1] Foret et al., "Sharpness-Aware Minimization for Efficiently Improving
           Generalization", ICLR 2021. Equation 2.
    .. [2] Kwon et al., "ASAM: Adaptive Sharpness-Aware Minimization for Scale-Invariant
           Learning of Deep Neural Networks", ICML 2021. Equation 7, element-wise.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from relflat_sk import RelativeFlatnessRegularizedClassifier
    >>> class SAMClassifier(SharpnessAwareMixin, RelativeFlatnessRegularizedClassifier):
    ...     pass
    >>> X, y = load_iris(return_X_y=True)
    >>> net = SAMClassifier(flatness_weight=0, verbose=0, random_state=0)
    >>> net.fit(X, y).score(X, y) > 0.9
    True
    """

    def __init__(
        self,
        *args: Any,
        sharpness_radius: float = 0.05,
        sharpness_adaptive: bool = False,
        sharpness_eta: float = 0.01,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.sharpness_radius = sharpness_radius
        self.sharpness_adaptive = sharpness_adaptive
        self.sharpness_eta = sharpness_eta

    def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **kwargs: Any) -> None:
        """Check the parameters of SAM."""
        check_number("sharpness_radius", self.sharpness_radius, positive=False)
        check_number("sharpness_eta", self.sharpness_eta, positive=False)
        super().on_train_begin(net, X=X, y=y, **kwargs)

    def train_step_single(self, batch: Any, **fit_params: Any) -> Any:
        """Compute loss and output at the weights, and gradients at the highest point around."""
        learnable = [p for _, p in self.get_all_learnable_params() if p.requires_grad]
        accumulated = [p.grad for p in learnable]
        _clear(learnable)
        random_states = get_states(self.device)
        step = super().train_step_single(batch, **fit_params)
        parts = [value for name, value in vars(self).items() if name.endswith("_")]
        eta = self.sharpness_eta if self.sharpness_adaptive else None
        uphill = _uphill(learnable, self.sharpness_radius, eta)
        _clear(learnable)
        with _moved(uphill, parts):
            set_states(self.device, random_states)
            torch.clear_autocast_cache()  # it holds the weights of the first pass
            self.__dict__["_in_second_pass"] = True
            try:
                super().train_step_single(batch, **fit_params)
            finally:
                del self.__dict__["_in_second_pass"]
        torch.clear_autocast_cache()
        for p, grad in zip(learnable, accumulated, strict=True):
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad.add_(grad)
        return step


def _clear(parameters: Iterable[Tensor]) -> None:
    for p in parameters:
        p.grad = None


@torch.no_grad()
def _uphill(
    parameters: Sequence[Tensor], radius: float, eta: float | None
) -> list[tuple[Tensor, Tensor]]:
    """Pair each parameter that has a gradient with its part of the step of steepest ascent."""
    moved = [p for p in parameters if p.grad is not None]
    scales = [torch.ones_like(p) if eta is None else p.abs().add_(eta) for p in moved]
    steepest = [cast(Tensor, p.grad) * scale for p, scale in zip(moved, scales, strict=True)]
    norm = nn.utils.get_total_norm(steepest)
    share = radius / norm.clamp_min(torch.finfo(norm.dtype).tiny)
    return [
        (p, grad * scale * share.to(grad))
        for p, scale, grad in zip(moved, scales, steepest, strict=True)
    ]


@contextmanager
def _moved(steps: Sequence[tuple[Tensor, Tensor]], parts: Iterable[Any]) -> Iterator[None]:
    """Move parameters by the steps inside the context, and restore them bit by bit.

    Buffers of the parts come back as well, such as the running statistics of batch norm.
    """
    buffers = [
        (m, name, buffer, buffer.clone())
        for part in parts
        if isinstance(part, nn.Module)
        for m in part.modules()
        for name, buffer in m.named_buffers(recurse=False)
    ]
    before = [(p, p.detach().clone()) for p, _ in steps]
    try:
        with torch.no_grad():
            for p, step in steps:
                p.add_(step)
        yield
    finally:
        with torch.no_grad():
            for m, name, buffer, value in buffers:
                setattr(m, name, buffer)
                buffer.copy_(value)
            for p, value in before:
                p.copy_(value)

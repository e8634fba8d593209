"""Relative flatness of a mini-batch as a term of the training loss.

Noise of relative size ``delta`` in a layer's features raises the loss, to second order, by
``delta^2 kappa / (2 m)`` (P21 Theorem 5). The penalty adds this quantity for ``delta = 1``. It is
computed from what the forward pass of the training step sends through the layer, without a
second pass. Its gradient flows to all parameters that influence features, weight or predictions.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from relflat_sk._checks import check_boolean, check_integer, check_number
from relflat_sk._losses.curvature import is_curved_at
from relflat_sk._losses.loss import (
    BatchLoss,
    Loss,
    as_criterion,
    warn_of_ending,
    warn_of_no_curvature,
)
from relflat_sk._network.batches import check_weights
from relflat_sk._network.borrowing import requiring_grad, unwrapped
from relflat_sk._network.layers import Layer
from relflat_sk._network.network import (
    check_part,
    primary_output,
    warn_of_weights,
    warn_unless_mean,
)
from relflat_sk._network.recording import find_ending
from relflat_sk._numerics import constant, full_precision, without_autocast
from relflat_sk._penalty.batch_flatness import batch_flatness
from relflat_sk._penalty.capture import Capture, Plan
from relflat_sk._penalty.limit import Measured, PenaltyLimit, constant_loss
from relflat_sk._penalty.quiet import without_hooks

__all__ = ["RelativeFlatnessPenalty"]


SETTINGS = ("layer", "normalize", "probes", "weight", "clip", "every")


@contextmanager
def _refusing_checkpoints() -> Iterator[None]:
    """Refuse gradient checkpointing where what runs again is not what was recorded."""
    try:
        yield
    except CheckpointError as error:
        raise ValueError(
            "gradient checkpointing runs normalisations or attention again, and not as the penalty "
            "needs them at earlier layers. Train without it (gradient_checkpointing=False), or "
            "penalise the last layer (layer=-1) of a network without nn.MultiheadAttention."
        ) from error


def check_settings(owner: Any, prefix: str = "") -> None:
    """Refuse settings that make no penalty, in the attributes of a penalty or of a net."""
    settings = {name: getattr(owner, f"{prefix}{name}") for name in SETTINGS}
    check_boolean(f"{prefix}normalize", settings["normalize"])
    check_integer(f"{prefix}probes", settings["probes"], minimum=1)
    check_number(f"{prefix}weight", settings["weight"], positive=None)
    check_number(f"{prefix}clip", settings["clip"], optional=True)
    check_integer(f"{prefix}every", settings["every"], minimum=1)
    if isinstance(settings["layer"], list | tuple) and not settings["layer"]:
        raise ValueError(f"{prefix}layer must name at least one layer, got an empty sequence.")


class RelativeFlatnessPenalty:
    r"""Compute the relative flatness of a batch, to add to the loss of a plain torch loop.

    The penalty is

    .. math:: \text{weight} \sum_{\text{layers}} \frac{\kappa}{2 m}, \qquad
        \kappa = \sum_{s,t} \langle w_s, w_t \rangle \mathrm{Tr}(H_{s,t}),

    where :math:`m` is the number of features that the layer receives, and :math:`H` the Hessian
    of the criterion on the batch in the layer's weight ([1]_, Definition 3 and Theorem 5).

    Parameters
    ----------
    layer : int, str, nn.Module, a sequence of these, or "all", default=-1
        The penalised layer: its position among the layers with a weight matrix in the order of
        the forward pass, its dotted name, or the module. The terms of several layers are added.
    normalize : bool, default=False
        Whether to use the normalised flatness (Theorem 4), with the standard deviations of the
        features in the batch.
    probes : int, default=1
        Number of random probes per sample where there is no closed form: at hidden layers, and
        for criteria that `relflat_sk` does not know. The penalty is unbiased for any number.
    weight : float, default=0.1
        Factor of the penalty, as `flatness_weight` of `RelativeFlatnessRegularizedNet`.
    clip : float or None, default=1.0
        Limit of ``weight * penalty``, as `flatness_clip` of `RelativeFlatnessRegularizedNet`. The
        penalty is scaled down to it, by what its past calls have shown of the captured network:
        another network begins anew. None: no limit, as published. Without a limit, a large weight
        can end in a dead network, which is perfectly flat.
    every : int, default=1
        Steps from one penalty to the next. With k, every k-th call returns the penalty k times as
        heavy, which is the same in the mean, and the others return 0 at no cost.

    Raises
    ------
    ValueError
        If `probes` or `every` is no positive integer, `normalize` is not a boolean, `layer` is
        empty, or `weight` or `clip` are out of range. When called: if layer, target or weights do
        not fit the forward pass, or gradient checkpointing runs normalisations or attention behind
        an earlier layer again.
    LayerNotFoundError
        From `capture`, if there is no such layer.
    RuntimeError
        If called without a forward pass inside `capture`.

    See Also
    --------
    RelativeFlatnessRegularizedNet : A skorch net with this penalty.
    relative_flatness : Measure :math:`\kappa` of a trained network.

    Notes
    -----
    Any layer that `relflat_sk.relative_flatness` measures can be penalised. For a convolution,
    `m` is the number of inputs of one patch. Batch norm in training mode counts as a linear map
    with the statistics of the batch. A layer with low-rank adapters has the merged weight; dropout
    inside the adapters counts as noise that is added to its output.

    At a head that is tied to the embedding, H is the Hessian in the head's copy of the weight. The
    penalty's gradient reaches both uses of the weight. A layer whose weight is used a second time
    in any other way, by another layer or by a function, is refused.

    No part of the network runs a second time. A penalty at an earlier layer costs one more
    differentiation of the network behind that layer.

    References
    ----------
    .. [1] Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021.

    Examples
    --------
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> criterion, penalty = torch.nn.CrossEntropyLoss(), RelativeFlatnessPenalty()
    >>> X, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    >>> with penalty.capture(net):
    ...     y_pred = net(X)
    >>> loss = criterion(y_pred, y) + penalty(criterion, y_pred, y)
    >>> loss.backward()

    The penalty itself, without weight and limit:

    >>> published = RelativeFlatnessPenalty(weight=1.0, clip=None)
    """

    def __init__(
        self,
        layer: Layer | Sequence[Layer] = -1,
        normalize: bool = False,
        probes: int = 1,
        *,
        weight: float = 0.1,
        clip: float | None = 1.0,
        every: int = 1,
    ) -> None:
        self.layer = layer
        self.normalize = normalize
        self.probes = probes
        self.weight = weight
        self.clip = clip
        self.every = every
        check_settings(self)
        self.limit = PenaltyLimit()
        # those of the captured networks; with None, the next network goes on with `limit`
        self._limits: WeakKeyDictionary[nn.Module, PenaltyLimit] | None = None
        self._capture: Capture | None = None  # of the network in training
        self._checked: Any = None  # a criterion

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in SETTINGS)
        return f"{type(self).__name__}({values})"

    def __getstate__(self) -> dict[str, Any]:
        # a criterion may be a function, which pickle cannot store; a copy goes on with a copied
        # network
        return vars(self) | {"_capture": None, "_checked": None, "_limits": None}

    def state_dict(self) -> dict[str, Any]:
        """Return what past steps of the last network have shown the limit, to resume a training.

        Returns
        -------
        dict of str to number, Tensor or None
            For `load_state_dict` of a penalty with the same parameters. It is plain numbers, and as
            `weights` the network's parameters in one row: None before the first step, else (p,).
            `torch.save` stores it, and `torch.load` reads it with ``weights_only=True``.

        Examples
        --------
        >>> RelativeFlatnessPenalty().state_dict()["steps"]
        0
        """
        return self.limit.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where another penalty has stopped, with the network that is captured next.

        The training goes on as without interruption if torch's random state is restored as well.

        Parameters
        ----------
        state_dict : dict of str to number, Tensor or None
            From `state_dict`.

        Raises
        ------
        ValueError
            If it has other names.

        Examples
        --------
        >>> penalty = RelativeFlatnessPenalty()
        >>> penalty.load_state_dict(RelativeFlatnessPenalty().state_dict())
        """
        self.limit.load_state_dict(state_dict)
        self._limits = None

    def capture(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Record what a forward pass sends through the layers.

        Parameters
        ----------
        module : nn.Module
            The network in training; it, or parts of it, may be compiled by `torch.compile`.

        Returns
        -------
        context manager
            Call the network inside it, once. The penalty can be called inside or after it.

        Notes
        -----
        Compiled code can be differentiated only once. So networks run without compilation inside
        the context, but for parts before the penalty's layers if these are the last ones.

        Examples
        --------
        >>> import torch
        >>> net, penalty = torch.nn.Linear(4, 3), RelativeFlatnessPenalty()
        >>> with penalty.capture(net):
        ...     y_pred = net(torch.ones(5, 4))
        """
        network = unwrapped(module)
        if self._limits is None:
            self._limits = WeakKeyDictionary({network: self.limit})
        self.limit = self._limits.setdefault(network, PenaltyLimit())
        return nullcontext() if self.limit.is_resting(self.every) else record_step(self, module)

    @property
    def layers(self) -> tuple[Layer, ...] | None:
        """The layers as the user names them now, None for all."""
        layer: Any = self.layer
        if isinstance(layer, str) and layer == "all":
            return None
        return tuple(layer) if isinstance(layer, list | tuple) else (layer,)

    @property
    def plan(self) -> Plan:
        """The layers that steps record, known since the first call."""
        assert self._capture is not None
        assert self._capture.plan is not None
        return self._capture.plan

    def __call__(
        self,
        criterion: Any,
        y_pred: Any,
        y: Tensor,
        sample_weight: Tensor | None = None,  # (n,)
    ) -> Tensor:
        """Compute the penalty of the last forward pass inside `capture`."""
        loss = Loss(as_criterion(criterion))
        check_part(loss, y_pred, y, "penalty")
        output = full_precision(primary_output(y_pred))
        if not self.limit.begin_step(self.every):
            return output.new_zeros(())
        if sample_weight is not None:
            check_weights(sample_weight.detach().cpu(), len(output))
        output = loss.classes_second(output, y)
        warn_of_ending(loss.criterion, find_ending(output))
        target = loss.read_target(output, y)
        weight = None if sample_weight is None else sample_weight.to(output)
        batch = BatchLoss(loss, target, weight)
        is_known = loss.is_curved or self._checked is loss.criterion
        term, share = penalise_batch(self, batch, output, batch(output))
        if not is_known and self.weight and not term and not is_curved_at(output, batch):
            warn_of_no_curvature(loss, "the penalty", "without it")
        return term if share is None else share * term


# -- what nets do in their steps as well ----------------------------------------------------


def record_step(
    penalty: RelativeFlatnessPenalty, module: nn.Module
) -> AbstractContextManager[None]:
    """Record a forward pass of a step that has the penalty."""
    compiled = module._modules.get("_orig_mod")  # inside of what `torch.compile` returned
    network = module if compiled is None else compiled
    capture = penalty._capture
    if capture is None or not capture.is_of(network, penalty.layers):
        capture = penalty._capture = Capture(network, penalty.layers)
    return capture.open(compiled=compiled is not None)


def quiet_hooks(penalty: RelativeFlatnessPenalty) -> AbstractContextManager[None]:
    """Call no hooks of the user on gradients."""
    return nullcontext() if penalty._capture is None else penalty._capture.hooks.quiet()


@_refusing_checkpoints()
def penalise_batch(
    penalty: RelativeFlatnessPenalty, batch: BatchLoss, output: Tensor, value: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Compute the penalty of a checked batch, and the share that the limit leaves of it.

    The share is a constant in the differentiation, and None without a limit. `value` is the
    batch's loss.
    """
    capture, penalty._capture = penalty._capture, None  # if this fails, the next step begins anew
    if capture is None or not capture.has_recorded:
        raise RuntimeError(
            "the penalty has recorded no forward pass. Call the network, or what torch.compile "
            "returned, inside `with penalty.capture(module):` before each call of the penalty."
        )
    loss, target, module = batch.loss, batch.target, capture.parts[0]
    with capture.hooks.quiet():
        layers, last = capture.finish(output, weighted=batch.weight is not None)
    penalty._capture = capture
    if penalty._checked is not loss.criterion:
        warn_unless_mean(loss, output, target.values)
        if loss.row is None:
            with requiring_grad(module.parameters()):
                read = batch(output)
            warn_of_weights(loss, read, output, module)
        penalty._checked = loss.criterion
    with capture.hooks.quiet(), without_autocast(output):
        term = batch_flatness(
            batch,
            output,
            layers,
            last,
            capture.explicit,
            probes=penalty.probes,
            normalize=penalty.normalize,
            scale=penalty.weight * penalty.every,
        )
    if penalty.clip is None:
        return term, None
    of_constant = constant_loss(batch, output, batch.counts(output))
    measured = None
    if penalty.limit.needs_measurement:
        parameters = [p for p in module.parameters() if p.requires_grad]
        with without_autocast(output), capture.hooks.quiet(), without_hooks(parameters):
            norms = _gradient_norm(value, parameters), _gradient_norm(term, parameters)
        weights = torch.cat([p.detach().flatten().to(value) for p in parameters])
        measured = Measured(*norms, weights)
    with without_autocast(output):
        share: Tensor = penalty.limit.share(
            value.detach(), of_constant, term.detach(), penalty.clip, measured
        )
    return term, share


def _gradient_norm(value: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Compute the norm of a gradient over all parameters, and keep the graph."""
    if not value.requires_grad:
        return torch.zeros_like(value)
    found = torch.autograd.grad(
        value, parameters, constant(1.0, value), retain_graph=True, allow_unused=True
    )
    norm: Tensor = nn.utils.get_total_norm([
        gradient.coalesce().values() if gradient.is_sparse else gradient  # as embeddings may have
        for gradient in found
        if gradient is not None
    ])
    return norm.to(value.device)

"""Measure trained nets that wait for it at the same time, in one stacked pass over their data."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from inspect import getattr_static
from typing import Any

import numpy as np
import torch
from skorch.dataset import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

from relflat_sk._checks import gather_checks
from relflat_sk._network import Network, borrowed
from relflat_sk.fleet._fleet import Fleet
from relflat_sk.fleet._member import Same, criterion_key, module_key
from relflat_sk.fleet._stack import stack_tensors
from relflat_sk.fleet._stackable import NotStackable, Parts, check_stackable
from relflat_sk.fleet._vmapped import Vmapped
from relflat_sk.measures import Flatness, plan_stacked_pass, warn_of
from relflat_sk.training import EPOCH_TRAINER, RelativeFlatnessRegularizedNet, knows_its_batch

__all__ = ["StackedMeasures", "measure_with_others"]

_LIBRARY = f"{__name__.partition('.')[0]}."
# the methods between a score and the outputs of the network
_SCORE = (
    "evaluation_step",
    "forward",
    "forward_iter",
    "get_dataset",
    "get_iterator",
    "predict",
    "predict_proba",
    "score",
)


@dataclass(frozen=True)
class StackedMeasures:
    """The results of a net in a stacked pass. Shapes: `outputs` (n, d)."""

    found: dict[tuple[str, str], Flatness]
    outputs: Tensor


def measure_with_others(
    network: Network, names: Sequence[str], layer: int | str
) -> StackedMeasures | None:
    """Measure a net of a fleet together with others that are measured at the moment."""
    trainer = EPOCH_TRAINER.get()
    if not isinstance(trainer, Fleet):
        return None
    try:
        key = (*_key(network), tuple(names), layer)
    except NotStackable:
        return None
    measure = partial(_measure_all, names=names, layer=layer)
    measured: StackedMeasures | None = trainer.together(key, network, measure)
    if measured is not None:
        warn_of(network, measured.found)
    return measured


def _key(network: Network) -> tuple[Any, ...]:
    """Return what networks have in common that can be measured in one stacked pass."""
    source = network.source
    net = None if source is None else source.model
    if source is None or not isinstance(net, RelativeFlatnessRegularizedNet):
        raise NotStackable("its data are transformed for each net")
    check_stackable(net, Parts(net.module_), {})
    loader = net.iterator_valid, net.get_params_for("iterator_valid").keys() - {"batch_size"}
    if loader != (DataLoader, set()) or net.dataset is not Dataset:
        raise NotStackable("it reads data in a way of its own")
    if not isinstance(source.X, np.ndarray | Tensor):
        raise NotStackable("its data are no array")
    if any(map(knows_its_batch, network.module.modules())):
        raise NotStackable("its outputs depend on the other samples of a batch")
    library = next(one for one in type(net).__mro__ if one.__module__.startswith(_LIBRARY))
    # `available_if` makes a new function whenever a class is asked for it
    kinds = type(net), library
    own, its = ([getattr_static(kind, name, None) for name in _SCORE] for kind in kinds)
    if own != its:
        raise NotStackable("it has its own way to a score")
    data = (Same(source.X), Same(source.y), Same(source.sample_weight))
    return module_key(network.module), criterion_key(network.loss.criterion), *data


def _measure_all(
    networks: Sequence[Network], names: Sequence[str], layer: int | str
) -> Sequence[StackedMeasures | None]:
    """Measure networks of one architecture on the same data; None if it has to be one by one."""
    module = networks[0].module
    plan = plan_stacked_pass(networks[0], names, layer)
    if plan is None or type(module.get_submodule(plan.layer)) is not nn.Linear:
        return [None] * len(networks)
    body = Vmapped(module, plan.layer)
    weights = stack_tensors([one.module.named_parameters() for one in networks])
    body.bind(weights, {}, stack_tensors([one.module.named_buffers() for one in networks]))
    with torch.no_grad(), borrowed(module), gather_checks():
        totals, outputs = body.map(plan.sums)
        summaries = plan.summaries(weights[f"{plan.layer}.weight"], outputs)
    found = []
    for k, (network, summary) in enumerate(zip(networks, summaries, strict=True)):
        own = {key: total[k] for key, total in totals.items()}
        found.append(StackedMeasures(plan.results(network, own, summary), outputs[k]))
    return found

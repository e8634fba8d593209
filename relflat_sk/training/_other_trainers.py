"""What the callbacks for other libraries' trainers share: the penalty's settings, and the data."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from relflat_sk._checks import check_integer
from relflat_sk._penalty.penalty import RelativeFlatnessPenalty
from relflat_sk._random import fork_rng
from relflat_sk.measures import flatness_report

# shuffles, with samples of about the same length side by side; not imported, which takes seconds
_LENGTH_GROUPED = ("transformers.trainer_pt_utils", "LengthGroupedSampler")


class FlatTraining:
    """The penalty and the measurements of one training."""

    def __init__(
        self, layer: Any, weight: float, clip: float | None, every: int | None, dataset: Any
    ) -> None:
        self.penalty = RelativeFlatnessPenalty(layer, weight=weight, clip=clip)
        check_integer("every", every, minimum=1, optional=True)
        self._every = every
        self.dataset = dataset

    @property
    def is_penalised(self) -> bool:
        """Whether there is a penalty."""
        return self.penalty.weight != 0

    def is_due(self, epoch: float, *, ends: bool = False) -> bool:
        """Return whether the flatness is to be measured."""
        return self._every is not None and (ends or epoch % self._every == 0)

    def measure(self, network: nn.Module, rows: DataLoader[Any], criterion: Any) -> float:
        """Measure the relative flatness, in evaluation mode, added over the layers."""
        layer: Any = self.penalty.layer
        device = next((parameter.device for parameter in network.parameters()), None)
        with fork_rng(device):
            report = flatness_report(
                network,
                rows,
                None,
                measures=["relative_flatness"],
                layers=layer,
                criterion=criterion,
                random_state=0,
            )
        return float(report["value"].sum())


def rows_in_order(
    loader: Any, dataset: Any, split: Callable[[Any], tuple[Any, Any]], batch_size: int | None
) -> DataLoader[Any]:
    """Return a loader of the same samples that shuffles and draws nothing.

    A second pass through a trainer's own loader would change the order of later epochs.
    """
    found = getattr(loader, "dataset", None) if dataset is None else dataset
    if found is None or isinstance(found, IterableDataset) or not hasattr(found, "__getitem__"):
        raise ValueError(
            "the flatness is measured on samples that are read by their numbers, but the training "
            f"data are a {type(loader if found is None else found).__name__}. Pass a map-style "
            "data set as dataset=..., or every=None for no measurement."
        )
    if dataset is None:
        found = _drawn(loader, found)
    collate = getattr(loader, "collate_fn", None) or torch.utils.data.default_collate
    return DataLoader(
        found,
        batch_size=batch_size or 1,
        collate_fn=lambda samples: split(collate(samples)),
        generator=torch.Generator(),
    )


def _drawn(loader: Any, dataset: Any) -> Any:
    """Return those samples of a data set that a loader draws in an epoch, or may draw."""
    sampler = _find_sampler(loader)
    if isinstance(sampler, SubsetRandomSampler):
        return Subset(dataset, [int(i) for i in sampler.indices])
    if _draws_all(sampler, dataset):
        return dataset
    raise ValueError(
        "the flatness is measured on the samples that are trained on, but the "
        f"{type(loader if sampler is None else sampler).__name__} of the training data does not "
        "say which samples of the data set it draws. Pass them as dataset=..., or every=None for "
        "no measurement."
    )


def _draws_all(sampler: Any, dataset: Any) -> bool:
    """Return whether a sampler draws every sample of a data set in an epoch, in any order."""
    if isinstance(sampler, SequentialSampler | RandomSampler):
        return len(sampler.data_source) == len(dataset)
    kind = type(sampler)
    if (kind.__module__, kind.__name__) == _LENGTH_GROUPED:
        return len(sampler) == len(dataset)
    # a trainer may distribute another sampler's numbers in place of the data set
    return isinstance(sampler, DistributedSampler) and getattr(sampler, "dataset", None) is dataset


def _find_sampler(loader: Any) -> Any:
    """Find what draws the numbers of samples, behind samplers that form or share out batches."""
    sampler = getattr(loader, "batch_sampler", None)
    if sampler is None:
        return getattr(loader, "sampler", None)
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return sampler.sampler if type(sampler) is BatchSampler else sampler

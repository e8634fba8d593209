"""What the callbacks for other trainers share: arguments, extras, and the measured samples."""

import sys

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import relflat_sk.training as door
from relflat_sk.training._other_trainers import FlatTraining, rows_in_order
from tests.data_kinds import Stream

DATA = TensorDataset(torch.arange(10.0), torch.arange(10))
SOME = [7, 2, 5]


def numbers(loader, dataset=None):
    rows = rows_in_order(loader, dataset, lambda batch: batch, 4)
    return [int(i) for _, y in rows for i in y]


class Shared(BatchSampler):
    """Gives one process its share of the batches, as accelerate does."""

    def __init__(self, batch_sampler):
        self.batch_sampler = batch_sampler

    def __iter__(self):
        return iter(list(self.batch_sampler)[::2])


LOADERS = {
    "sequential": {},
    "random": {"shuffle": True},
    "distributed": {"sampler": DistributedSampler(DATA, num_replicas=2, rank=0)},
    "batches": {"batch_sampler": BatchSampler(RandomSampler(DATA), 4, drop_last=True)},
    "shared": {"batch_sampler": Shared(BatchSampler(RandomSampler(DATA), 4, drop_last=False))},
}


@pytest.mark.parametrize("kind", LOADERS)
def test_all_samples_are_measured_in_their_order(kind):
    assert numbers(DataLoader(DATA, **LOADERS[kind])) == list(range(10))


@pytest.mark.parametrize("wrap", [list, torch.tensor], ids=["list", "tensor"])
def test_only_the_samples_of_a_subset_are_measured(wrap):
    sampler = SubsetRandomSampler(wrap(SOME))
    assert numbers(DataLoader(DATA, sampler=sampler)) == SOME
    batches = Shared(BatchSampler(sampler, 2, drop_last=False))
    assert numbers(DataLoader(DATA, batch_sampler=batches)) == SOME


def test_samples_that_are_grouped_by_length_are_measured_in_their_order():
    library = pytest.importorskip("transformers.trainer_pt_utils")
    sampler = library.LengthGroupedSampler(2, lengths=[2, 6, 3, 6, 2, 2, 3, 6, 2, 3])
    assert numbers(DataLoader(DATA, sampler=sampler)) == list(range(10))


def test_a_stream_cannot_be_measured():
    with pytest.raises(ValueError, match="training data are a Stream. Pass a map-style"):
        numbers(DataLoader(Stream(np.ones(2), np.ones(2))))


class NoSampler:
    dataset = DATA


class Picks(BatchSampler):
    def __iter__(self):
        return iter([[1, 2]])


UNKNOWN = {
    "weighted": (
        DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 5 + [0.0] * 5, 10)),
        "WeightedRandomSampler",
    ),
    "numbers": (DataLoader(DATA, sampler=SOME), "list"),
    "lists": (DataLoader(DATA, batch_sampler=[SOME]), "list"),
    "own batches": (
        DataLoader(DATA, batch_sampler=Picks(SequentialSampler(DATA), 2, False)),
        "Picks",
    ),
    "of a part": (DataLoader(DATA, sampler=RandomSampler(range(5))), "RandomSampler"),
    "distributed part": (
        DataLoader(DATA, sampler=DistributedSampler(SOME, num_replicas=1, rank=0)),
        "DistributedSampler",
    ),
    "no sampler": (NoSampler(), "NoSampler"),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_samplers_that_may_leave_samples_out_need_a_data_set(kind):
    loader, name = UNKNOWN[kind]
    with pytest.raises(ValueError, match=rf"but the {name}.* of the training .*Pass them as data"):
        numbers(loader)
    assert numbers(loader, DATA) == list(range(10))


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="every must be a positive integer or None, got 0"):
        FlatTraining(-1, 1.0, 0.5, every=0, dataset=None)
    with pytest.raises(ValueError, match="clip must be a finite positive number or None"):
        FlatTraining(-1, 1.0, -1, every=1, dataset=None)


@pytest.mark.parametrize(
    ("name", "module", "library"),
    [
        ("LightningFlatnessCallback", "_lightning", "lightning.pytorch"),
        ("TransformersFlatnessCallback", "_transformers", "transformers"),
    ],
)
def test_without_the_extra_the_error_says_how_to_install_it(name, module, library, monkeypatch):
    monkeypatch.delitem(sys.modules, f"relflat_sk.training.{module}", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    extra = library.removesuffix(".pytorch")
    with pytest.raises(ImportError, match=rf'pip install "relflat_sk\[{extra}\]"'):
        getattr(door, name)
    with pytest.raises(AttributeError, match="no attribute 'LightningCallback'"):
        _ = door.LightningCallback

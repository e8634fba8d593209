"""Training of networks by written-out gradients, which takes about half as long as autograd."""

from relflat_sk._engine.chain import draw_mask
from relflat_sk._engine.epoch import (
    Member,
    cut_batches,
    find_chain_of,
    make_generators,
    record_epoch,
    train_alone,
    train_chain,
)
from relflat_sk._engine.qualify import NeedsOwnLoop, Parts, check_net, library_class
from relflat_sk._engine.step import Batch, Own, Settings, Step, limited, settings_of
from relflat_sk._engine.turns import EPOCH_TRAINER, EpochTrainer

__all__ = [
    "EPOCH_TRAINER",
    "Batch",
    "EpochTrainer",
    "Member",
    "NeedsOwnLoop",
    "Own",
    "Parts",
    "Settings",
    "Step",
    "check_net",
    "cut_batches",
    "draw_mask",
    "find_chain_of",
    "library_class",
    "limited",
    "make_generators",
    "record_epoch",
    "settings_of",
    "train_alone",
    "train_chain",
]

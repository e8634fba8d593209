"""Training of networks by written-out gradients, which takes about half as long as autograd."""

from relflat_sk._engine.chain import draw_mask
from relflat_sk._engine.epoch import (
    EPOCH_TRAINER,
    Member,
    find_chain_of,
    make_generators,
    train_alone,
    train_chain,
    train_epoch,
)
from relflat_sk._engine.qualify import NeedsOwnLoop, Parts, check_net
from relflat_sk._engine.step import Batch, Settings, Step

__all__ = [
    "EPOCH_TRAINER",
    "Batch",
    "Member",
    "NeedsOwnLoop",
    "Parts",
    "Settings",
    "Step",
    "check_net",
    "draw_mask",
    "find_chain_of",
    "make_generators",
    "train_alone",
    "train_chain",
    "train_epoch",
]

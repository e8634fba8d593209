"""Training of many nets at the same time, as one stacked model."""

from relflat_sk.ensemble._trainer import EnsembleTrainer

__all__ = ["EnsembleTrainer"]

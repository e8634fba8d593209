"""Training of many nets at the same time, as one stacked model."""

from relflat_sk.fleet._fleet_training import fleet_training
from relflat_sk.fleet._trainer import FleetTrainer

__all__ = ["FleetTrainer", "fleet_training"]

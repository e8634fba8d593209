"""Training of many nets at the same time, as one stacked model."""

from relflat_sk.fleet._trainer import FleetTrainer, fleet_training

__all__ = ["FleetTrainer", "fleet_training"]

"""Training of many nets at the same time, as one stacked model."""

# for the packages above, not public
from relflat_sk.fleet._fleet import Fleet as Fleet
from relflat_sk.fleet._fleet import fleet_size as fleet_size
from relflat_sk.fleet._fleet_training import fleet_training
from relflat_sk.fleet._trainer import FleetTrainer
from relflat_sk.fleet._turns import seconds_used as seconds_used

__all__ = ["FleetTrainer", "fleet_training"]

"""How the loss or accuracy reacts to changes of the weights."""

from relflat_sk.measures._sharpness.sharpness import SHARPNESS, sharpness_curve

__all__ = ["SHARPNESS", "sharpness_curve"]

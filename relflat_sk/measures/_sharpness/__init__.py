"""How the loss or the accuracy reacts to changes of the weights."""

from relflat_sk.measures._sharpness.sharpness import SHARPNESS_MEASURES, sharpness_curve

__all__ = ["SHARPNESS_MEASURES", "sharpness_curve"]

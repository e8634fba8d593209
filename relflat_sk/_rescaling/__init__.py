"""Changes of weights that keep the function: reparameterisation, folding of norm layers."""

from relflat_sk._rescaling.folding import AffineLayer, fold_layers
from relflat_sk._rescaling.reparameterization import reparameterize, trace
from relflat_sk._rescaling.scales import describe_step

__all__ = ["AffineLayer", "describe_step", "fold_layers", "reparameterize", "trace"]

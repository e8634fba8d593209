"""Changes of weights that keep the function: reparameterisation, folding of batch norm."""

from relflat_sk._rescaling.layers import AffineLayer, describe_step, fold_layers, trace
from relflat_sk._rescaling.reparameterization import reparameterize
from relflat_sk._rescaling.scales import step_name

"""Changes of weights that keep the function: reparameterisation, folding of batch norm."""

from relflat_sk._rescaling.folding import AffineLayer, fold_layers
from relflat_sk._rescaling.reparameterization import reparameterize
from relflat_sk._rescaling.scales import step_name
from relflat_sk._rescaling.tracing import describe_step, trace

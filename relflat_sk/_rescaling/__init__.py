"""Changes of weights that keep the function: reparameterisation, folding of batch norm."""

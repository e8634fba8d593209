"""Relative flatness of a training batch, differentiable."""

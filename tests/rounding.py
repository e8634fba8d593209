"""How far apart two ways of computing the same numbers may be.

A sum depends on the order of its terms. Kernels choose the order by processor, by shape, by the
layout of memory and by the number of threads. Numbers are equal to the bit only where the same
calls run twice on one machine, such as a training that is repeated with its seed.
"""

import torch

# A step sums over dozens of samples and features, forwards and backwards. Adam divides a gradient
# by its size: one that is 1,000 times smaller than its terms has 1,000 times their relative error,
# and moves a weight by a learning rate of about 0.01.
STEP = 100
FLOAT32 = STEP * torch.finfo(torch.float32).eps  # of values in float32 that no training precedes


def rounding(n_steps=1, dtype=torch.float32):
    """Tolerances after so many steps, for weights of ordinary size and for what they return."""
    tolerance = STEP * n_steps * torch.finfo(dtype).eps
    return {"rtol": tolerance, "atol": tolerance}

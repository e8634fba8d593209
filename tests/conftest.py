"""Seeds and devices; no mathematics."""

import matplotlib as mpl
import numpy as np
import pytest
import torch

mpl.use("Agg")
# several test processes share few cores: threads of small kernels only wait for each other
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param

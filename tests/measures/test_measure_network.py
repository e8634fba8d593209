"""How many passes over the data measures take together."""

import pytest
import torch
from torch import nn

from relflat_sk.measures._layer_measures import TRACE_LIKE
from relflat_sk.measures._measure_network import NETWORK_WIDE, measure_network
from tests.measures.nets import CE, make, network

# networks with random weights are at no minimum
pytestmark = pytest.mark.filterwarnings("ignore:.*is negative:relflat_sk.FlatnessWarning")
TRACES = [name for name, measure in TRACE_LIKE.items() if not measure.normalized]
NORMALIZED = ["normalized_relative_flatness"]


def counted(kind, n=12, batch_size=4):
    """A network, and a list with an entry for each batch it is run on."""
    net, X, y = make(kind, n)
    runs = []
    net.register_forward_hook(lambda *_: runs.append(1))
    return network(net.eval(), CE, X, y, batch_size=batch_size), runs


def count_passes(runs, measure):
    runs.clear()
    measure()
    return len(runs) / 3  # batches


@pytest.mark.parametrize(
    ("kind", "names", "layers", "n_passes"),
    [
        *[(kind, TRACES, [-1], 1) for kind in ("mlp relu", "mlp tanh", "conv", "transformer")],
        ("mlp relu", [*TRACES, "gradient_norm"], "all", 1),
        ("mlp relu", [*TRACES, "eigenvalue_flatness", "hessian_max_eigenvalue"], [-1], 1),
        # the first pass is for the features' spread
        ("mlp relu", [*TRACES, "gradient_norm", *NORMALIZED], "all", 2),
    ],
)
def test_measures_share_passes(kind, names, layers, n_passes):
    at, runs = counted(kind)
    assert count_passes(runs, lambda: measure_network(at, names, layers)) == n_passes


@pytest.mark.filterwarnings("ignore:the margin is .*not positive:relflat_sk.FlatnessWarning")
@pytest.mark.parametrize("name", ["l2_norm", "fisher_rao_norm", "frobenius_product"])
def test_measures_of_the_whole_network_need_no_pass_beside_their_own(name):
    at, runs = counted("mlp relu")
    own = count_passes(runs, lambda: NETWORK_WIDE[name](at))
    both = count_passes(runs, lambda: measure_network(at, [name, *TRACES], [-1]))
    assert both == own + 1


class Alternating(nn.Module):
    """Has a closed form at its layer for the first batch, and none for the second."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.other = nn.Linear(10, 10).double()

    def forward(self, x):
        z = self.layer(x)
        return z if len(x) == 4 else z.tanh()


def test_a_network_may_change_from_batch_to_batch():
    X, y = torch.randn(7, 4).double(), torch.arange(7) % 3
    at = network(Alternating(), CE, X, y, batch_size=4)
    names = ["normalized_relative_flatness", "relative_flatness"]
    found = measure_network(at, names, ["layer"])
    spread = X.std(dim=0, correction=0)
    scaled = Alternating()
    scaled.load_state_dict(at.module.state_dict())
    with torch.no_grad():
        scaled.layer.weight *= spread
    at = network(scaled, CE, X / spread, y, batch_size=4)
    expected = measure_network(at, ["relative_flatness"], ["layer"])
    assert found["layer", names[0]].value == pytest.approx(
        expected["layer", "relative_flatness"].value, rel=1e-10
    )

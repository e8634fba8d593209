"""Finding layers, and reading off the graph what lies behind them."""

import pytest
import torch
from torch import nn

from relflat_sk import LayerNotFoundError, relative_flatness
from relflat_sk._network.graph import find_link
from relflat_sk._network.layers import find_layer
from relflat_sk._network.network import primary_output
from relflat_sk._network.recording import record_tail
from tests import oracles

CE = nn.CrossEntropyLoss()


class Nested(nn.Module):
    """Registered in another order than called, with a functional tail."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.body = nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True))

    def forward(self, x):
        return self.head(self.body(x)).mul(1.0)


@pytest.fixture
def nested():
    torch.manual_seed(0)
    return Nested().double()


@pytest.fixture
def data():
    torch.manual_seed(1)
    return torch.randn(10, 5).double(), torch.arange(10) % 3


def test_positions_count_in_forward_order(nested, data):
    X, y = data
    for layer, name in ((-1, "head"), (1, "head"), (0, "body.0"), (-2, "body.0")):
        expected = oracles.relative_flatness(nested, name, CE, X, y)
        for way in (layer, name, nested.get_submodule(name)):
            value = relative_flatness(nested, X, y, layer=way, criterion=CE, batch_size=3)
            assert value == pytest.approx(expected, rel=1e-10)


def test_one_forward_pass_per_batch(data):
    X, y = data
    net = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    calls = []
    net[0].register_forward_hook(lambda *_: calls.append(1))
    relative_flatness(net, X, y, criterion=CE, batch_size=4)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (2, LayerNotFoundError, r"no layer 2. Layers with a weight matrix: 0: 'body.0' \(Linear"),
        (-3, LayerNotFoundError, "no layer -3"),
        ("tail", LayerNotFoundError, "no layer 'tail'"),
        ("body.1", LayerNotFoundError, "'body.1' is a ReLU, which has no weight matrix"),
        (nn.Linear(2, 2), LayerNotFoundError, "not part of the network"),
        (1.0, TypeError, "layer must be an int, a dotted module name or the module itself, got 1"),
        (True, TypeError, "got True of type bool"),
        (None, TypeError, "got None"),
    ],
)
def test_no_such_layer(nested, data, layer, error, message):
    with pytest.raises(error, match=message):
        relative_flatness(nested, *data, layer=layer, criterion=CE)


def test_network_without_weights(data):
    with pytest.raises(LayerNotFoundError, match="no layer whose weight matrix can be measured"):
        relative_flatness(nn.Sequential(nn.ReLU()), *data, criterion=CE)


@pytest.mark.parametrize("layer", [nn.Bilinear(2, 2, 2), nn.Embedding(3, 2)])
def test_layers_with_other_weights_are_refused_by_name(layer):
    net = nn.Sequential(layer, nn.Linear(2, 2))
    with pytest.raises(TypeError, match=f"not defined at a {type(layer).__name__}"):
        relative_flatness(net, torch.tensor([1, 2]), torch.tensor([0, 1]), layer="0", criterion=CE)


class Shared(nn.Module):
    def __init__(self, tie):
        super().__init__()
        self.a = nn.Linear(5, 5)
        self.b = nn.Linear(5, 5)
        self.tie = tie
        if tie:
            self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x)) if self.tie else self.a(self.a(x))


def test_shared_modules_are_refused(data):
    with pytest.raises(ValueError, match="layer 'a' was called 2 times in one forward pass"):
        relative_flatness(Shared(False).double(), *data, layer="a", criterion=CE)
    with pytest.raises(ValueError, match=r"layer 'b' is shared by the modules \['a', 'b'\]"):
        relative_flatness(Shared(True).double(), *data, criterion=CE)


def test_a_layer_that_is_not_called_is_refused(data):
    with pytest.raises(ValueError, match="layer 'b' was called 0 times"):
        relative_flatness(Shared(False).double(), *data, layer="b", criterion=CE)


class Overwrites(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x):
        h = x * 2
        z = self.a(h)
        h.add_(1)
        return z


def test_features_overwritten_in_place_are_noticed(data):
    with pytest.raises(ValueError, match="input that layer 'a' received was overwritten in place"):
        relative_flatness(Overwrites().double(), *data, criterion=CE)


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_linear_layer_that_is_none_is_noticed(data):
    net = nn.Sequential(Scaled(5, 3)).double()
    with pytest.raises(ValueError, match="layer '0' does not compute W x"):
        relative_flatness(net, *data, criterion=CE)


def test_parametrized_layers_are_measured_at_their_effective_weight(data):
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    plain = relative_flatness(net, *data, criterion=CE)
    nn.utils.parametrizations.weight_norm(net[2])
    assert relative_flatness(net, *data, criterion=CE) == pytest.approx(plain, rel=1e-12)


LINKED = {
    "identity": lambda z: z,
    "identity, dropout and views": lambda z: nn.Dropout().eval()(z.view(4, 3, 1)).squeeze(-1),
    "softmax": lambda z: z.softmax(-1),
    "softmax over axis 1": lambda z: nn.functional.softmax(z, 1),
    "log_softmax": lambda z: nn.LogSoftmax(dim=-1)(z),
    "sigmoid": lambda z: nn.Sigmoid()(z).float(),
}
NOT_LINKED = {
    "scaled": lambda z: 2 * z,
    "residual": lambda z: z + torch.ones(4, 3),
    "added to itself": lambda z: z + z,
    "softmax over samples": lambda z: z.softmax(0),
    "twice": lambda z: z.softmax(-1).log_softmax(-1),
    "transposed": lambda z: z.t(),
    "sliced": lambda z: z[:, 1:],
    "in place": lambda z: z.clone().relu_(),
    "inactive clamp": lambda z: z.clamp(-100, 100),
    "detached": lambda z: z.detach(),
    "unrelated": lambda z: torch.ones(4, 3, requires_grad=True) * 1,
}


@pytest.mark.parametrize("tail", LINKED)
def test_links_are_recognised(tail):
    layer = nn.Linear(5, 3)
    with torch.no_grad(), record_tail(layer, "") as recorder:
        output = LINKED[tail](layer(torch.randn(4, 5)))
    assert find_link(output, recorder[""].node) == tail.split(",")[0].split(" ")[0]


@pytest.mark.parametrize("tail", NOT_LINKED)
def test_other_functions_are_not_mistaken_for_links(tail):
    layer = nn.Linear(5, 3)
    with torch.no_grad(), record_tail(layer, "") as recorder:
        output = NOT_LINKED[tail](layer(torch.randn(4, 5)))
    assert find_link(output, recorder[""].node) is None


def test_tails_in_place_do_not_disturb(data):
    X, y = data
    net = nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True)).double()
    expected = oracles.relative_flatness(net, "0", CE, X, y)
    assert relative_flatness(net, X, y, criterion=CE) == pytest.approx(expected, rel=1e-10)


def test_outputs_that_hold_the_logits():
    logits = torch.ones(2, 3)
    assert primary_output({"logits": logits, "loss": 1}) is logits
    assert primary_output((logits, 1)) is logits
    with pytest.raises(TypeError, match="must return a tensor, .* got dict"):
        primary_output({"scores": logits})


def test_find_layer_as_registered():
    assert find_layer(Nested(), -1) == "body.0"

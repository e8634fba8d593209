"""Networks compiled by torch.compile, in plain loops: same penalty, same gradients, compiled."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import is_parametrized
from torch.testing import assert_close

from relflat_sk import RelativeFlatnessPenalty
from tests.cases import published_penalty
from tests.penalty.every_draw import evaluate

CE = nn.CrossEntropyLoss()
# of torch's compiler, about its own insides
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def without_earlier_code():
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.heads = nn.ModuleDict({"classes": nn.Linear(36, 3)})
        self.scale = None

    def forward(self, x):
        out = self.heads["classes"](self.body(x))
        return out if self.scale is None else self.scale * out


def make():
    torch.manual_seed(0)
    return Net(), torch.randn(7, 1, 5, 5), torch.arange(7) % 3


def train(net, called, X, y, *, layer=-1, clip=0.5, inside=False, steps=3):
    """Return the losses and gradients of some steps."""
    penalty, found = RelativeFlatnessPenalty(layer, weight=1.0, clip=clip), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        with penalty.capture(called):
            output = called(X)
            if inside:
                term = penalty(CE, output, y)
        loss = CE(output, y) + (term if inside else penalty(CE, output, y))
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in net.parameters())])
        optimizer.step()
    return found


@pytest.mark.parametrize(
    ("backend", "layer", "inside"),
    [
        ("eager", -1, True),
        ("eager", 0, False),
        ("aot_eager", -1, False),
        ("aot_eager", 0, True),
        pytest.param("inductor", -1, False, marks=pytest.mark.slow),
        pytest.param("inductor", 0, True, marks=pytest.mark.slow),
    ],
)
def test_the_same_steps(backend, layer, inside):
    net, X, y = make()
    expected = train(net, net, X, y, layer=layer, inside=inside)
    net, X, y = make()
    compiled = torch.compile(net, backend=backend)
    found = train(net, compiled, X, y, layer=layer, inside=inside)
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert isinstance(net.heads["classes"], nn.Linear)
    assert "forward" not in vars(net.heads["classes"])
    assert_close(compiled.eval()(X), net.eval()(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inside", [True, False])
def test_steps_run_compiled_and_nothing_is_compiled_again(inside):
    net, X, y = make()
    runs, graphs = [], []

    def backend(graph, inputs):
        graphs.append(graph)

        def run(*args):
            runs.append(graph)
            return graph.forward(*args)

        return run

    compiled = torch.compile(net, backend=backend, fullgraph=True)
    train(net, compiled, X, y, steps=6, inside=inside)
    assert (len(graphs), len(runs)) == (1, 5)  # all steps but the first


@pytest.mark.parametrize("change", [weight_norm, spectral_norm])
def test_the_weight_of_the_last_layer_may_be_computed(change):
    found = []
    for compiles in (False, True):
        net, X, y = make()
        change(net.heads["classes"])
        found.append(train(net, torch.compile(net, backend="eager") if compiles else net, X, y))
    assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert is_parametrized(net.heads["classes"])


def test_hooks_of_the_last_layer_run_once():
    net, X, y = make()
    seen = []
    net.heads["classes"].register_forward_hook(lambda *args: seen.append(args[1][0].shape))
    train(net, torch.compile(net, backend="eager"), X, y, steps=3)
    assert seen == [(7, 36)] * 3


def test_refuses_a_network_that_begins_to_do_more_behind_its_last_layer():
    net, X, y = make()
    compiled = torch.compile(net, backend="eager")
    penalty = published_penalty()
    for _ in range(2):
        evaluate(penalty, compiled, CE, X, y)
    net.scale = 2.0
    with (
        pytest.raises(
            RuntimeError, match=r"last layer \('heads.classes'\) at first, and something else"
        ),
        penalty.capture(compiled),
    ):
        compiled(X)
    assert type(net.heads["classes"]) is nn.Linear
    assert "forward" not in vars(net.heads["classes"])


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [-1, 0])
def test_the_same_steps_on_cuda(layer):
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    net, X, y = (part.cuda() for part in make())
    expected = train(net, net, X, y, layer=layer)
    net, X, y = (part.cuda() for part in make())
    found = train(net, torch.compile(net), X, y, layer=layer)
    assert_close(found, expected, rtol=1e-3, atol=1e-4)

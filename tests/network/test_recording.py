"""What is recorded of a forward pass, and that the network is left as it was."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from relflat_sk._network.borrowing import ReplacedForwards, has_own_forward
from relflat_sk._network.layers import weight_layers
from relflat_sk._network.recording import Recorder, record_order, record_tail


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))


def is_as_before(net):
    return not any(has_own_forward(module) for module in net.modules())


def test_records_inputs_and_outputs_with_their_graph():
    net, x = make_net(), torch.randn(5, 4)
    with Recorder(weight_layers(net)) as recorder:
        y = net(x)
    features, output = recorder["2"].check()
    assert recorder["2"].name == "2"
    assert recorder["2"].layer is net[2]
    assert output is y
    assert recorder["2"].node is y.grad_fn
    assert_close(features, net[0](x).relu())
    assert features.requires_grad
    assert is_as_before(net)


def test_the_input_may_be_a_keyword_argument():
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    with Recorder({"": layer}) as recorder:
        layer(input=x)
    assert recorder[""].features is x


def test_records_of_the_tail_start_its_graph():
    net, x = make_net(), torch.randn(5, 4)
    with torch.no_grad(), record_tail(net, "2") as recorder:
        y = net(x)
        loss = y.square().sum()
    record = recorder["2"]
    assert not record.features.requires_grad
    assert not record.output.requires_grad
    assert_close(record.tail_input, record.output)
    (gradient,) = torch.autograd.grad(loss, record.offset)
    assert_close(gradient, 2 * y)
    assert not loss.grad_fn.next_functions[0][0].next_functions[1:]  # the tail and nothing else


def test_hooks_on_a_layers_output_belong_to_the_tail():
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    layer.register_forward_hook(lambda module, args, output: 3 * output)
    with torch.no_grad(), record_tail(layer, "") as recorder:
        total = layer(x).sum()
    _, output = recorder[""].check()
    assert_close(output, x @ layer.weight.T + layer.bias)
    (gradient,) = torch.autograd.grad(total, recorder[""].offset)
    assert_close(gradient, torch.full((5, 3), 3.0))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(3, 3)
        self.late = nn.Linear(3, 3)
        self.early = nn.Linear(3, 3)

    def forward(self, x):
        return self.early(self.late(self.early(x)))


def test_the_order_is_that_of_the_calls():
    net = Twice()
    with record_order(net) as recorder:
        net(torch.randn(2, 3))
    assert recorder.calls == ["early", "late", "early"]
    assert recorder.order == ["early", "late"]
    assert "unused" in recorder


@pytest.mark.parametrize(("name", "calls"), [("early", 2), ("unused", 0)])
def test_only_layers_that_are_called_once_can_be_measured(name, calls):
    net = Twice()
    with Recorder(weight_layers(net)) as recorder:
        net(torch.randn(2, 3))
    with pytest.raises(ValueError, match=rf"layer '{name}' was called {calls} times"):
        recorder[name].check()


def test_the_network_is_given_back_after_an_error():
    net = make_net()
    with pytest.raises(RuntimeError, match="shapes"), Recorder(weight_layers(net)) as recorder:
        net(torch.randn(5, 7))
    assert recorder.failed
    assert is_as_before(net)


def test_recorders_can_be_nested():
    net, x = make_net(), torch.randn(5, 4)
    net[2].forward = own = net[2].forward
    with Recorder(weight_layers(net)) as outer, Recorder({"2": net[2]}) as inner:
        net(x)
    assert outer.calls == ["0", "2"]
    assert inner.calls == ["2"]
    assert net[2].forward is own


def test_replaced_forwards_are_recognised_and_given_back():
    layer = nn.ReLU()
    with ReplacedForwards([(layer, torch.neg)]):
        assert has_own_forward(layer)
        assert layer(torch.tensor(2.0)) == -2
    assert not has_own_forward(layer)
    assert layer(torch.tensor(2.0)) == 2

r"""Sums over all paths from a network's inputs, and its biases, to its outputs.

A path leads along single weights. The sum over all paths of the products ``prod |w|^p`` along
them is one forward pass of ones through the network, with ``|W|^p`` in place of its weights [1]_:

.. math:: \sum_{paths} \prod |w|^p = 1^\top |W_L|^p (|W_{L-1}|^p (\dots |W_1|^p 1 + |b_1|^p) \dots)
    + 1^\top |b_L|^p .

Paths also start at every bias, as from an input that is always one. All values in this forward
pass are nonnegative, and positively homogeneous activations return nonnegative values unchanged.
Pooling has no weights: as in any forward pass, it returns the largest of its inputs' sums over
paths, or their average. Branches add up.

References
----------
.. [1] Neyshabur et al., "Norm-Based Capacity Control in Neural Networks", COLT 2015.
"""

import inspect
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from relflat_sk._network.folding import AffineLayer, describe_step, step_name, trace
from relflat_sk._network.network import Network, primary_output
from relflat_sk._network.recording import LayerRecord, Recorder, layer_input
from relflat_sk.measures._results import NotApplicableError


def sum_over_paths(network: Network, layers: Sequence[AffineLayer], power: int) -> float:
    """Sum the products of powers of weights along all paths through a network.

    To be used within `relflat_sk._network.borrowed`.
    """
    try:
        graph = trace(network.module)
    except ValueError as error:
        raise NotApplicableError(
            f"paths cannot be followed through this network: {error}"
        ) from error
    inputs = _first_inputs(network)
    with torch.no_grad():
        sums = _PathSums(network.module, graph, layers, inputs, power).run()
        total = float(primary_output(sums).sum())
    return total if total < torch.inf else torch.inf  # nan is infinity times a weight of zero


def _first_inputs(network: Network) -> dict[str, Any]:
    """Return the arguments of the module's call for the first batch, by name."""
    signature = inspect.signature(network.module.forward)
    inputs: dict[str, Any] = {}

    def keep_arguments(record: LayerRecord, args: Any, kwargs: Any, output: Any) -> Any:
        inputs.update(signature.bind(*args, **kwargs).arguments)
        return output

    with torch.no_grad(), Recorder({"": network.module}, keep_arguments):
        network(next(network.batches()).x)
    return inputs


class _PathSums(fx.Interpreter):
    """The forward pass of one sample of ones, with powers of weights in place of weights."""

    def __init__(
        self,
        module: nn.Module,
        graph: fx.Graph,
        layers: Sequence[AffineLayer],
        inputs: dict[str, Any],
        power: int,
    ) -> None:
        super().__init__(module, graph=graph)
        self.modules = dict(module.named_modules())
        self.extra_traceback = False  # our errors name the step themselves
        self.layers: dict[str, deque[AffineLayer]] = {}
        for layer in layers:
            self.layers.setdefault(layer.name, deque()).append(layer)  # one for each call
        self.folded = {layer.norm for layer in layers}
        # the graph has the inputs in the same order, but not always under the same names
        starts = [node for node in graph.nodes if node.op == "placeholder"]
        names = inspect.signature(module.forward).parameters
        self.names = {node.target: name for node, name in zip(starts, names, strict=False)}
        self.inputs = inputs
        self.power = power

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return one sample of ones in place of an input."""
        name = self.names.get(target)
        if name not in self.inputs:
            return super().placeholder(target, args, kwargs)  # an argument left at its default
        value = self.inputs[name]
        if not isinstance(value, Tensor):
            return value
        if not value.is_floating_point():
            raise NotApplicableError(
                f"paths start at floating-point numbers, but the network takes {name!r} of "
                f"{value.dtype}, as for an embedding."
            )
        return torch.ones_like(value[:1], dtype=torch.float64)

    def run_node(self, n: fx.Node) -> Any:
        """Run one step of the forward pass, if paths can lead through it."""
        if n.op in {"placeholder", "output"}:
            return super().run_node(n)
        if n.op == "get_attr":
            _refuse(n, self.module, "is used outside of any layer, so it belongs to no path")
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if not _has_tensor((args, kwargs)):  # arithmetic with sizes
            return super().run_node(n)
        first = layer_input(args, kwargs)
        if n.op == "call_module" and n.target in self.folded:
            return first
        if n.op == "call_module" and n.target in self.layers:
            return self._pass_layer(self.layers[str(n.target)].popleft(), first)
        step = step_name(n, self.modules)
        if step in _LINKS and all(user.op == "output" for user in n.users):
            return first  # the norms are of the network up to its logits
        if step in _SUMS and (kwargs or not all(isinstance(value, Tensor) for value in args)):
            _refuse(n, self.module, "adds something other than two sums over paths")
        if step not in _STEPS | _SUMS:
            _refuse(
                n,
                self.module,
                "is not known to be positively homogeneous, or not known to return nonnegative "
                "values unchanged. Paths can lead through ReLU and its variants, pooling, "
                "dropout, reshaping, sums and concatenation",
            )
        return super().run_node(n)

    def _pass_layer(self, layer: AffineLayer, x: Tensor) -> Tensor:
        """Apply the powers of a layer's weight and bias."""
        z = layer.apply(x, layer.weight.abs() ** self.power)
        if layer.bias is None:
            return z
        return z + layer.spread_bias(layer.bias.abs() ** self.power)


def _has_tensor(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_tensor, value))
    if isinstance(value, dict):
        return any(map(_has_tensor, value.values()))
    return isinstance(value, Tensor)


def _refuse(node: fx.Node, module: nn.Module, reason: str) -> NoReturn:
    step = describe_step(node, dict(module.named_modules()))
    raise NotApplicableError(f"there is no path norm of this network: {step} {reason}.")


# names of modules, functions and methods, see `step_name`
_STEPS = {
    *("identity", "relu", "leakyrelu", "prelu", "rrelu", "dropout", "zeropad", "assert"),
    *("maxpool", "avgpool", "adaptivemaxpool", "adaptiveavgpool", "upsamplingnearest"),
    *("flatten", "unflatten", "reshape", "view", "permute", "transpose", "squeeze", "unsqueeze"),
    *("pixelshuffle", "contiguous", "clone", "cat", "concat", "mean", "sum", "amax"),
    *("getitem", "getattr", "size", "dim"),
}
_SUMS = {"add", "iadd"}
_LINKS = {"softmax", "logsoftmax", "sigmoid"}

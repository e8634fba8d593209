"""A multilayer perceptron that can be sized from the data."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

from relflat_sk._checks import is_integer

_T = TypeVar("_T")

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "logistic": nn.Sigmoid,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
    "identity": nn.Identity,
}
_INITS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "default": None,
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": lambda w: nn.init.kaiming_uniform_(w, nonlinearity="relu"),
    "kaiming_normal": lambda w: nn.init.kaiming_normal_(w, nonlinearity="relu"),
    "uniform": lambda w: nn.init.uniform_(w, -0.1, 0.1),
    "normal": lambda w: nn.init.normal_(w, std=0.1**0.5),
}


class MLP(nn.Sequential):
    """A multilayer perceptron: linear layers with an activation in between.

    Its layers are named `hidden0`, `hidden1` and so on, and `output`.

    Parameters
    ----------
    n_features : int
        Number of inputs. Inputs with several axes, such as images, are flattened.
    n_outputs : int
        Number of outputs. There is no activation after the last layer.
    hidden_layer_sizes : int or sequence of int, default=(100,)
        Width of each hidden layer, as in `sklearn.neural_network.MLPClassifier`. An empty
        sequence makes a linear model.
    activation : {"relu", "tanh", "logistic", "gelu", "leaky_relu", "identity"}, default="relu"
        Activation of the hidden layers.
    init : str, default="default"
        How the weights are drawn. "default" is torch's own way. The others also set the biases to
        zero: "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "uniform"
        (between -0.1 and 0.1) and "normal" (variance 0.1). The papers on relative flatness use
        "xavier_normal", "kaiming_uniform", "uniform" and "normal".

    Raises
    ------
    ValueError
        If a size is not a positive integer, or `activation` or `init` is unknown.

    See Also
    --------
    RelativeFlatnessRegularizedClassifier : Trains it to classify.
    RelativeFlatnessRegularizedRegressor : Trains it to predict values.

    Examples
    --------
    >>> import torch
    >>> net = MLP(64, 10, hidden_layer_sizes=(32, 16))
    >>> net(torch.zeros(5, 8, 8)).shape
    torch.Size([5, 10])
    >>> [name for name, layer in net.named_children() if hasattr(layer, "weight")]
    ['hidden0', 'hidden1', 'output']
    """

    def __init__(
        self,
        n_features: int,
        n_outputs: int,
        hidden_layer_sizes: int | Sequence[int] = (100,),
        activation: str = "relu",
        init: str = "default",
    ) -> None:
        if isinstance(hidden_layer_sizes, Iterable):
            hidden = tuple(hidden_layer_sizes)
        else:
            hidden = (hidden_layer_sizes,)
        sizes = (n_features, *hidden, n_outputs)
        if not all(is_integer(size) and size >= 1 for size in sizes):
            raise ValueError(
                f"sizes must be positive integers, got n_features={n_features!r}, "
                f"n_outputs={n_outputs!r}, hidden_layer_sizes={hidden_layer_sizes!r}."
            )
        act = _choice("activation", activation, _ACTIVATIONS)
        draw = _choice("init", init, _INITS)
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        for i, (n_in, n_out) in enumerate(pairwise(sizes[:-1])):
            layers[f"hidden{i}"] = nn.Linear(int(n_in), int(n_out))
            layers[f"activation{i}"] = act()
        layers["output"] = nn.Linear(int(sizes[-2]), int(n_outputs))
        super().__init__(layers)
        if draw is not None:
            for layer in self:
                if isinstance(layer, nn.Linear):
                    with torch.no_grad():
                        draw(layer.weight)
                        layer.bias.zero_()


def _choice(name: str, value: str, table: dict[str, _T]) -> _T:
    if value not in table:
        raise ValueError(f"{name} must be one of {list(table)}, got {value!r}.")
    return table[value]

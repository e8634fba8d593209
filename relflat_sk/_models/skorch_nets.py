"""Fitted skorch nets as networks: their module, their criterion, and batches as they make them."""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse
from skorch import NeuralNet, NeuralNetClassifier
from skorch.dataset import Dataset as SkorchDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

from relflat_sk._losses import ProbabilityNLLLoss
from relflat_sk._models.options import DataOptions
from relflat_sk._network import Batches, LoadedBatches, Network, RowSource, make_batches

__all__ = ["CRITERION_ALONE", "skorch_batches", "skorch_network"]

# implementations of get_loss that, outside training, return the criterion and nothing else
CRITERION_ALONE: set[Any] = {NeuralNetClassifier.get_loss, NeuralNet.get_loss}


def skorch_network(net: NeuralNet, batches: Batches, options: DataOptions) -> Network:
    """Make a network of a fitted skorch net and batches of data."""
    if options.device is not None and torch.device(options.device) != torch.device(net.device):
        net = copy.deepcopy(net)
        net.module_.to(options.device)
        net.criterion_.to(options.device)
        net.device = options.device
    module = getattr(net.module_, "_orig_mod", net.module_)  # a compiled module runs no hooks

    def infer_uncompiled(x: Any) -> Any:
        compiled, net.module_ = net.module_, module
        try:
            return net.infer(x)
        finally:
            net.module_ = compiled

    forward = net.infer if module is net.module_ else infer_uncompiled
    return Network(module, options.loss(_criterion_of(net)), batches, forward)


def _criterion_of(net: NeuralNet) -> Any:
    """Find what a net minimises: its criterion, or its own `get_loss` where that differs."""
    criterion = getattr(net.criterion_, "_orig_mod", net.criterion_)  # of a compiled one
    get_loss = type(net).get_loss
    if get_loss is NeuralNetClassifier.get_loss and type(criterion) is nn.NLLLoss:
        # skorch's classifiers take the logarithm of the module's probabilities
        return ProbabilityNLLLoss(
            weight=criterion.weight,
            ignore_index=criterion.ignore_index,
            reduction=criterion.reduction,
        )
    if get_loss in CRITERION_ALONE:
        return criterion

    def loss_of_net(output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = net.get_loss(output, target, training=False)
        return loss

    loss_of_net.reduction = getattr(criterion, "reduction", "mean")  # type: ignore[attr-defined]
    return loss_of_net


def skorch_batches(net: NeuralNet, X: Any, y: Any, options: DataOptions) -> Batches:
    """Cut data into batches as a net would, without its data loader where that changes nothing."""
    arrays = isinstance(X, np.ndarray | Tensor | Mapping | tuple | RowSource) or issparse(X)
    params = net.get_params_for("iterator_valid")
    usual_loader = net.iterator_valid is DataLoader and not (params.keys() - {"batch_size"})
    if arrays and net.dataset is SkorchDataset and usual_loader:
        return options.batches(X, y)
    if isinstance(X, DataLoader | LoadedBatches):
        return options.batches(X, y)
    if options.sample_weight is not None:
        raise ValueError("sample_weight needs X and y as arrays, not a dataset.")
    dataset = net.get_dataset(X, y)
    if hasattr(dataset, "__len__") and len(dataset) == 0:  # a stream has no length
        raise ValueError("X has no samples, and flatness is a mean over samples.")
    params["batch_size"] = options.batch_size
    if "drop_last" in params:  # every sample counts, and the batches here are others than the net's
        params["drop_last"] = False
    loader = net.iterator_valid(dataset, **params)
    return make_batches(loader, in_order=options.in_order)

"""The training step of a net that minimises its loss and a flatness penalty."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import numpy as np
import torch
from skorch import NeuralNet
from skorch.history import History
from skorch.utils import to_tensor
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from relflat_sk._losses import Loss
from relflat_sk._network import cast_inputs, floating_parameter, primary_output
from relflat_sk._numerics import full_precision
from relflat_sk._penalty import RelativeFlatnessPenalty
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.measures import measure_layers
from relflat_sk.training._sample_weights import (
    plain,
    split_target,
    training_network,
    weigh,
    with_weights,
)

__all__ = ["IN_TRAINING", "PenalisedNet", "original"]

# what a net knows while it is trained only
IN_TRAINING = (
    "_captured",
    "_first_parameter",
    "_known_penalty",
    "_terms",
    "_trained_on",
    "_weights",
)


def original(module: Any) -> Any:
    """Return what `torch.compile` or torch's data parallelism was wrapped around."""
    children = getattr(module, "_modules", {})
    if "_orig_mod" in children:
        return original(children["_orig_mod"])
    wrapped = "module" in children and isinstance(module, DistributedDataParallel)
    return original(children["module"]) if wrapped else module


class PenalisedNet(NeuralNet):
    """A skorch net whose training step knows sample weights and the penalty.

    Everything happens in `infer` and `get_loss`, so that whatever else changes skorch's
    training step (accelerate, gradient accumulation, two passes as in SAM) goes together
    with it. Its arguments and their meaning are those of `RelativeFlatnessRegularizedNet`.
    """

    flatness_weight: float
    flatness_layer: Any
    flatness_normalize: bool
    flatness_probes: int
    flatness_warmup: float
    criterion_: Any

    # of the training step in progress
    _captured: RelativeFlatnessPenalty | None = None
    _terms: tuple[Tensor, Tensor | None] | None = None  # loss and penalty
    # of the training in progress
    _weights: np.ndarray | None = None

    def _check_penalty(self) -> None:
        for name in ("flatness_weight", "flatness_warmup"):
            value = getattr(self, name)
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not (number and 0 <= value < np.inf):
                raise ValueError(f"{name} must be a finite number >= 0, got {value!r}.")
        self._penalty()
        if any(isinstance(layer, nn.Module) for layer in self._layers()):
            raise TypeError(
                "flatness_layer must be a position or a dotted name, got a module: the net "
                "trains a copy of its own. Use the layer's name, as in module.named_modules()."
            )
        optimizer = self.optimizer
        searches = isinstance(optimizer, type) and issubclass(optimizer, torch.optim.LBFGS)
        if self.flatness_weight > 0 and searches:
            raise ValueError(
                f"{optimizer.__name__} evaluates the objective several times per step and "
                "compares the values, but the penalty may be drawn anew each time (random "
                "probes) and changes with the batch. Use SGD or Adam, say, or flatness_weight=0."
            )

    def _penalty(self) -> RelativeFlatnessPenalty:
        return RelativeFlatnessPenalty(
            self.flatness_layer, self.flatness_normalize, self.flatness_probes
        )

    def _layers(self) -> Any:
        """List the penalised layers as the measures take them: "all" stays "all"."""
        several = isinstance(self.flatness_layer, list | tuple) or self.flatness_layer == "all"
        return self.flatness_layer if several else [self.flatness_layer]

    def _watcher(self) -> RelativeFlatnessPenalty:
        """Return one penalty for all steps with the same settings: it knows its way around."""
        settings = self.flatness_layer, self.flatness_normalize, self.flatness_probes
        known = self.__dict__.get("_known_penalty")
        if known is None or known[0] != settings:
            known = self.__dict__["_known_penalty"] = settings, self._penalty()
        return known[1]

    def _ramp(self) -> float:
        """Share of the penalty's weight that counts in the epoch in progress."""
        if not self.flatness_warmup:
            return 1.0
        epoch = max(1, len(self.history or ()))
        return min(1.0, epoch / self.flatness_warmup)

    # -- what skorch calls in each step --------------------------------------------------

    def infer(self, x: Any, **fit_params: Any) -> Any:
        """Run the module on a batch; watch the penalised layers if there will be gradients."""
        module = self.module_
        learns = torch.is_grad_enabled()
        if not (learns and isinstance(x, Tensor) and x.dtype == self._type_of(module)):
            x = cast_inputs(to_tensor(x, device=self.device), module)
        if not (learns and self.flatness_weight > 0):
            return _full_precision(super().infer(x, **fit_params))
        if "_orig_mod" in module._modules:
            with self._uncompiled():  # not `self.infer`, which may be a subclass's
                return PenalisedNet.infer(self, x, **fit_params)
        # past __setattr__, which skorch looks through all its components in
        penalty = self.__dict__["_captured"] = self._watcher()
        with penalty.capture(original(module)):
            return _full_precision(super().infer(x, **fit_params))

    def _type_of(self, module: nn.Module) -> torch.dtype | None:
        """Return that of the inputs, which is looked for once in a training."""
        known = self.__dict__.get("_first_parameter")
        if known is None or known[0] is not module:
            known = self.__dict__["_first_parameter"] = module, floating_parameter(module)
        return None if known[1] is None else known[1].dtype

    @contextmanager
    def _uncompiled(self) -> Iterator[None]:
        """Run the module as it was before `torch.compile`.

        Compiled code may have been traced without our recording, be it of another instance of
        the class, and then ignores it; and its graph does not tell what follows a layer.
        """
        compiled = self.module_
        self.__dict__["module_"] = compiled._orig_mod
        try:
            yield
        finally:
            self.__dict__["module_"] = compiled

    def get_loss(self, y_pred: Any, y_true: Any, X: Any = None, training: bool = False) -> Tensor:
        """Compute the loss of a batch, in training with the penalty added."""
        penalty: RelativeFlatnessPenalty | None = self.__dict__.pop("_captured", None)
        criterion = Loss(original(self.criterion_))
        y_true, weight = split_target(y_true)
        y_pred = _full_precision(primary_output(y_pred))
        self._check_output(criterion, y_pred)
        if isinstance(y_true, Tensor):
            y_true = y_true.to(y_pred.device)
        else:
            y_true = to_tensor(y_true, device=self.device)
        target = criterion.read_target(y_pred, y_true)
        if weight is None:
            weighted = {}
            loss: Tensor = super().get_loss(y_pred, target.values, X=X, training=training)
        else:
            weighted = {"sample_weight": weight.to(y_pred)}
            loss = weigh(criterion, y_pred, target.values, weighted["sample_weight"])
        if not training:
            return loss
        term = None
        if penalty is not None and (weight is None or bool((weight > 0).any())):
            scale = float(self._ramp() * self.flatness_weight)
            term = penalty.of_batch(criterion, y_pred, target, scale=scale, **weighted)
        # of several passes in a step, the first is at the weights the step starts from
        self.__dict__.setdefault("_terms", (loss, term))
        return loss if term is None else loss + term

    def _check_output(self, criterion: Loss, y_pred: Tensor) -> None:
        """Refuse outputs that do not fit the task."""

    def evaluation_step(self, batch: Any, training: bool = False) -> Any:
        """Run the module for its output alone."""
        try:
            return super().evaluation_step(batch, training=training)
        finally:
            self.__dict__.pop("_captured", None)  # keeps no graph alive

    def notify(self, method_name: str, **cb_kwargs: Any) -> None:
        """Call the callbacks, which see batches without weights."""
        if "batch" in cb_kwargs and self._weights is not None:
            cb_kwargs["batch"] = plain(cb_kwargs["batch"])
        super().notify(method_name, **cb_kwargs)

    def on_batch_begin(self, net: Any, batch: Any = None, training: bool = False) -> None:
        """Forget what was computed between steps."""
        super().on_batch_begin(net, batch=batch, training=training)
        self.__dict__.pop("_terms", None)

    def on_batch_end(
        self, net: Any, batch: Any = None, training: bool = False, **step: Any
    ) -> None:
        """Record loss and penalty of a training step apart."""
        super().on_batch_end(net, batch=batch, training=training, **step)
        if training and self._terms is not None:
            loss, term = self.__dict__.pop("_terms")
            penalty = 0.0 if term is None else term.item()
            _record(self.history, train_loss=loss.item(), flatness_penalty=penalty)

    def get_split_datasets(self, X: Any, y: Any = None, **fit_params: Any) -> Any:
        """Split as skorch does, weights along with the data; remember what is trained on."""
        if self._weights is not None:
            for name in ("iterator_train", "iterator_valid"):
                if self.get_params_for(name).get("collate_fn") is not None:
                    raise ValueError(
                        f"sample_weight travels with the labels, which {name}__collate_fn may not "
                        "expect: leave it out, or put the weights into a criterion of your own."
                    )
            X = with_weights(self.get_dataset(X, y), self._weights)
        train, valid = super().get_split_datasets(X, y, **fit_params)
        self._trained_on = train
        return train, valid

    # -- once it is trained --------------------------------------------------------------

    def _record_flatness(self) -> None:
        """Measure the flatness of the training data, as far as it can be measured."""
        network = training_network(self, self._trained_on)
        with torch.random.fork_rng(devices=[]):  # a seed for probes, without taking a number
            seed = int(torch.randint(2**31 - 1, ()))
        try:
            name = (
                "normalized_relative_flatness" if self.flatness_normalize else "relative_flatness"
            )
            found = measure_layers(network, [name], self._layers(), random_state=seed)
            self.relative_flatness_ = sum(one.value for one in found.values())
        except (TypeError, ValueError) as error:
            warnings.warn(
                f"relative_flatness_ could not be measured: {error}",
                FlatnessWarning,
                stacklevel=3,
            )
            self.relative_flatness_ = np.nan
        curved = network.loss.row is not None and bool(network.loss.row.links)
        if self.relative_flatness_ == 0 and self.flatness_weight > 0 and curved:
            warnings.warn(
                "the network is perfectly flat: it has probably died (constant outputs). Clip "
                "gradients (callbacks=[skorch.callbacks.GradientNormClipping(1.0)]), use "
                f"flatness_warmup, or a flatness_weight below {self.flatness_weight!r}.",
                FlatnessWarning,
                stacklevel=3,
            )


def _record(history: Any, **values: float) -> None:
    """Record several values of a batch, in a plain history by finding the batch only once."""
    if type(history) is History:
        history[-1]["batches"][-1].update(values)
        return
    for name, value in values.items():
        history.record_batch(name, value)


def _full_precision(output: Any) -> Any:
    """Return outputs in float32 at least, for losses and numpy."""
    if type(output) is tuple:
        return tuple(map(_full_precision, output))
    return full_precision(output) if isinstance(output, Tensor) else output

"""The training step of a net that minimises its loss plus a flatness penalty."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from skorch.dataset import unpack_data
from skorch.utils import to_tensor
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from relflat_sk._checks import check_integer, check_number
from relflat_sk._losses import Loss, Target, weighted_loss
from relflat_sk._network import (
    cast_inputs,
    floating_parameter,
    primary_output,
    refuse_whole,
    takes_whole,
)
from relflat_sk._numerics import constant, full_precision, read_numbers
from relflat_sk._penalty import RelativeFlatnessPenalty, constant_loss
from relflat_sk.training._fast_net import record_batch
from relflat_sk.training._measured_net import MeasuredNet
from relflat_sk.training._outputs import movable
from relflat_sk.training._sample_weights import (
    plain_batch,
    split_target,
    with_weights,
)
from relflat_sk.training._state import TrainingState

__all__ = ["PenalisedNet", "unwrap"]


def unwrap(module: Any) -> Any:
    """Return the module inside wrappers of `torch.compile` and of torch's data parallelism."""
    children = getattr(module, "_modules", {})
    if "_orig_mod" in children:
        return unwrap(children["_orig_mod"])
    parallel = "module" in children and isinstance(module, DistributedDataParallel)
    return unwrap(children["module"]) if parallel else module


class PenalisedNet(MeasuredNet):
    """Train with a flatness penalty and with sample weights.

    Both enter in `infer` and `get_loss` only. Code that changes other parts of skorch's
    training step (accelerate, gradient accumulation, the two passes of SAM) therefore works
    together with this class.
    """

    flatness_probes: int
    flatness_warmup: float
    module_: Any
    criterion_: Any

    _training: TrainingState | None = None
    # None before a batch has shown it
    _criterion_takes_whole: bool | None = None

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state.pop("_training", None)  # a copy that a callback makes is not in training
        return state

    def _state(self) -> TrainingState:
        """Return the state of the training, a new one for steps made outside of `fit`."""
        if self._training is None:
            self._training = TrainingState()
        return self._training

    # -- the penalty ---------------------------------------------------------------------

    def _check_penalty(self) -> None:
        """Refuse parameters that make no penalty, and optimizers that do not work with one."""
        check_number("flatness_weight", self.flatness_weight, positive=False)
        check_number("flatness_warmup", self.flatness_warmup, positive=False)
        check_integer("flatness_probes", self.flatness_probes, minimum=1)
        check_number("flatness_clip", self.flatness_clip, optional=True)
        RelativeFlatnessPenalty(*self._penalty_settings())  # checks the layers
        if any(isinstance(layer, nn.Module) for layer in self._layers()):
            raise TypeError(
                "flatness_layer must be a position or a dotted name, got a module. The net trains "
                "a copy of its own, which does not contain that module. Pass the layer's name, as "
                "listed by module.named_modules()."
            )
        optimizer = self.optimizer
        searches = isinstance(optimizer, type) and issubclass(optimizer, torch.optim.LBFGS)
        if self.flatness_weight > 0 and searches:
            raise ValueError(
                f"{optimizer.__name__} evaluates the objective several times per step and "
                "compares the values, but the penalty may use new random probes each time, and "
                "depends on the batch. Use another optimizer, such as SGD or Adam, or "
                "flatness_weight=0."
            )

    def _penalty_settings(self) -> tuple[Any, bool, int]:
        return self.flatness_layer, self.flatness_normalize, self.flatness_probes

    def _penalty(self, state: TrainingState) -> RelativeFlatnessPenalty:
        """Return the training's penalty, a new one if its settings have changed."""
        settings, penalty = self._penalty_settings(), state.penalty
        if penalty is None or (penalty.layer, penalty.normalize, penalty.probes) != settings:
            penalty = state.penalty = RelativeFlatnessPenalty(*settings)
        penalty.clip = self.flatness_clip
        return penalty

    def _penalty_weight(self) -> float:
        """Return the weight of the penalty in the current epoch, warm-up included."""
        if not self.flatness_warmup:
            return float(self.flatness_weight)
        epoch = max(1, len(self.history or ()))
        return float(min(1.0, epoch / self.flatness_warmup) * self.flatness_weight)

    # -- called by skorch in each step ---------------------------------------------------

    def infer(self, x: Any, **fit_params: Any) -> Any:
        """Run the module on a batch; record the penalised layers if gradients are enabled."""
        module = self.module_
        with_gradients = torch.is_grad_enabled()
        if not (with_gradients and isinstance(x, Tensor) and x.dtype == self._input_dtype(module)):
            x = cast_inputs(to_tensor(x, device=self.device), module)
        if not (with_gradients and self.flatness_weight > 0):
            return _full_precision(super().infer(x, **fit_params))
        state, network = self._state(), unwrap(module)
        penalty = self._penalty(state)
        compiled = "_orig_mod" in module._modules
        with penalty.capture_compiled(module, network) if compiled else penalty.capture(network):
            output = _full_precision(super().infer(x, **fit_params))
        state.recorded = True
        return output

    def _input_dtype(self, module: nn.Module) -> torch.dtype | None:
        """Return the dtype of the network's inputs; searches its parameters once per training."""
        state = self._state()
        found = state.first_parameter
        if found is None or found[0] is not module:
            found = state.first_parameter = module, floating_parameter(module)
        return None if found[1] is None else found[1].dtype

    @contextmanager
    def _uncompiled_criterion(self) -> Iterator[None]:
        """Replace a compiled criterion by the original one, which can be differentiated twice."""
        compiled = self.criterion_
        # past __setattr__, with which skorch registers components
        self.__dict__["criterion_"] = getattr(compiled, "_modules", {}).get("_orig_mod", compiled)
        try:
            yield
        finally:
            self.__dict__["criterion_"] = compiled

    def get_loss(self, y_pred: Any, y_true: Any, X: Any = None, training: bool = False) -> Tensor:
        """Compute the loss of a batch, with the penalty added in training."""
        state = self._state()
        recorded, state.recorded = state.recorded, False
        criterion = Loss(unwrap(self.criterion_))
        y_true, weight = split_target(y_true)
        if not isinstance(y_pred, Tensor) and self._takes_whole(criterion, y_pred, y_true):
            return self._loss_of_whole(y_pred, y_true, weight, recorded, X=X, training=training)
        y_pred = _full_precision(primary_output(y_pred))
        self._check_output(criterion, y_pred)
        target = self._read_target(criterion, y_pred, y_true)
        weight = None if weight is None else weight.to(y_pred)
        plain_loss = super().get_loss

        def loss_of(output: Tensor) -> Tensor:
            if weight is not None:
                return weighted_loss(criterion, output, target.values, weight)
            with self._uncompiled_criterion() if recorded else nullcontext():
                value: Tensor = plain_loss(output, target.values, X=X, training=training)
                return value

        loss = loss_of(y_pred)
        if not training:
            return loss
        term = share = None
        if recorded and state.penalty is not None:
            penalty = state.penalty
            term = penalty.of_batch(criterion, y_pred, target, weight, self._penalty_weight())
            share = penalty.share_left(term, lambda: (loss, constant_loss(loss_of, y_pred, weight)))
        if state.terms is None:  # the first pass of a step is at the weights it starts from
            state.terms = loss, term, share
        if term is None:
            return loss
        return loss + (term if share is None else share * term)

    def train_step_single(self, batch: Any, **fit_params: Any) -> dict[str, Any]:
        """Compute output, loss and gradients of a batch, as skorch does."""
        self._set_training(True)
        inputs, y_true = unpack_data(batch)
        y_pred = self.infer(inputs, **fit_params)
        loss = self.get_loss(y_pred, y_true, X=inputs, training=True)
        # torch would make a new tensor of one
        torch.autograd.backward(loss, constant(1.0, loss) if loss.ndim == 0 else None)
        return {"loss": loss, "y_pred": y_pred}

    def _takes_whole(self, criterion: Loss, y_pred: Any, y_true: Any) -> bool:
        """Return whether the criterion takes more than one tensor; tried on one batch."""
        if self._criterion_takes_whole is None:
            self._criterion_takes_whole = criterion.row is None and takes_whole(
                criterion.criterion, y_pred, to_tensor(y_true, device=self.device)
            )
        return self._criterion_takes_whole

    def _loss_of_whole(
        self,
        y_pred: Any,
        y_true: Any,
        weight: Tensor | None,
        recorded: bool,
        *,
        X: Any,
        training: bool,
    ) -> Tensor:
        """Compute the loss of a criterion that takes the module's whole output."""
        if weight is not None:
            refuse_whole(self.criterion_, "sample_weight")
        if recorded:
            refuse_whole(self.criterion_, "penalty")
        loss: Tensor = super().get_loss(y_pred, y_true, X=X, training=training)
        if training and self._state().terms is None:
            self._state().terms = loss, None, None
        return loss

    def _read_target(self, criterion: Loss, y_pred: Tensor, y_true: Any) -> Target:
        """Check the labels of a batch, and bring them to the output's device."""
        if not isinstance(y_true, Tensor):
            y_true = to_tensor(y_true, device=self.device)
        return criterion.read_target(y_pred, y_true)

    def _check_output(self, criterion: Loss, y_pred: Tensor) -> None:
        """Refuse outputs that do not fit the task."""

    def evaluation_step(self, batch: Any, training: bool = False) -> Any:
        """Run the module for its output alone, without keeping a graph for the penalty."""
        try:
            return movable(super().evaluation_step(batch, training=training))
        finally:
            state = self._training
            if state is not None and state.recorded:
                state.recorded, state.penalty = False, None

    def validation_step(self, batch: Any, **fit_params: Any) -> Any:
        """Compute output and loss of a validation batch, without what skorch cannot collect."""
        step = super().validation_step(batch, **fit_params)
        step["y_pred"] = movable(step["y_pred"])
        return step

    def notify(self, method_name: str, **cb_kwargs: Any) -> None:
        """Call the callbacks, which get batches without sample weights."""
        state = self._training
        if state is not None and state.sample_weight is not None and "batch" in cb_kwargs:
            cb_kwargs["batch"] = plain_batch(cb_kwargs["batch"])
        super().notify(method_name, **cb_kwargs)

    def on_batch_begin(self, net: Any, batch: Any = None, training: bool = False) -> None:
        """Forget losses that were computed between steps."""
        super().on_batch_begin(net, batch=batch, training=training)
        self._state().terms = None

    def on_batch_end(
        self, net: Any, batch: Any = None, training: bool = False, **step: Any
    ) -> None:
        """Record loss and penalty of a training step, if another loop has not read them."""
        super().on_batch_end(net, batch=batch, training=training, **step)
        if training and self._state().terms is not None:
            record_batch(self.history, self._read_step(step, "train"))

    def _read_step(self, step: Mapping[str, Any], prefix: str) -> dict[str, float]:
        """Read the loss and the penalty of a training step separately."""
        state = self._state()
        if prefix != "train" or state.terms is None:
            return super()._read_step(step, prefix)
        (loss, term, share), state.terms = state.terms, None
        numbers = [x.detach().to(loss.dtype) for x in (loss, term, share) if x is not None]
        train_loss, *others = read_numbers(*numbers)
        # without a penalty or a limit, its number needs no tensor
        penalty, left = [*others, *(0.0, 1.0)[len(others) :]]
        clipped = left < 1
        return {
            "train_loss": train_loss,
            "flatness_penalty": penalty * left if clipped else penalty,
            "flatness_clipped": float(clipped),
        }

    def get_split_datasets(self, X: Any, y: Any = None, **fit_params: Any) -> Any:
        """Split off the validation data as skorch does, together with the sample weights.

        Parameters
        ----------
        X, y : array-like
            Inputs and labels.
        **fit_params
            Passed on to the `train_split` function.

        Returns
        -------
        dataset_train, dataset_valid : torch Dataset or None
            None for validation if nothing is held out.

        Raises
        ------
        ValueError
            If there are sample weights, and the user's own function collates batches.
        """
        state = self._state()
        if state.sample_weight is not None:
            for name in ("iterator_train", "iterator_valid"):
                if self.get_params_for(name).get("collate_fn") is not None:
                    raise ValueError(
                        "sample_weight travels with the labels of a batch, which "
                        f"{name}__collate_fn may not expect. Leave out the collate function, or "
                        "put the weights into a criterion of your own."
                    )
            X = with_weights(self.get_dataset(X, y), state.sample_weight)
        state.dataset, valid = super().get_split_datasets(X, y, **fit_params)
        return state.dataset, valid


def _full_precision(output: Any) -> Any:
    """Convert half-precision outputs to float32, for losses and numpy."""
    if type(output) is tuple:
        return tuple(map(_full_precision, output))
    return full_precision(output) if isinstance(output, Tensor) else output

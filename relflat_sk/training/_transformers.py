"""The flatness penalty and the history of relative flatness in the `Trainer` of Hugging Face."""

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk._losses.loss import Loss, as_criterion, weighted_loss
from relflat_sk._models.network_of import IGNORED, is_causal_language_model, next_labels
from relflat_sk._network.network import primary_output
from relflat_sk._numerics import full_precision
from relflat_sk.training._other_trainers import FlatTraining, rows_in_order

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "TransformersFlatnessCallback needs transformers, which is not installed. "
        'Install it with: pip install "relflat_sk[transformers]"'
    ) from error


# the criterion of each `config.problem_type`; that of all other models is the cross-entropy
_CRITERIA: dict[Any, type[nn.Module]] = {
    "regression": nn.MSELoss,
    "multi_label_classification": nn.BCEWithLogitsLoss,
}
# how far the model's own loss may be from the criterion's: rounding in half precision
_ROUNDING = 0.02


class TransformersFlatnessCallback(TrainerCallback):
    r"""Add the flatness penalty to the loss of a Hugging Face model, and log its flatness.

    In each step, ``weight * kappa / (2 m)`` of the batch is added to the loss that the model
    returns, with the model's flatness :math:`\kappa` at a layer with m inputs; see
    `RelativeFlatnessPenalty`. At the end of an epoch, the flatness is measured on all training
    data, in evaluation mode.

    The trainer's logs and `trainer.state.log_history` get ``flatness_penalty``, the mean since the
    entry before, and ``relative_flatness``. An entry is made at the end of each measured epoch.
    The trainer's own ``loss`` contains the penalty.

    Parameters
    ----------
    criterion : nn.Module or None, default=None
        The loss that the model computes, called as ``criterion(logits, labels)``. None: the
        cross-entropy, or what the model's ``config.problem_type`` says. The labels of causal
        language models are shifted to the next token.
    layer : int, str, a sequence of these, or "all", default=-1
        The layer: its position in the order of the forward pass, or its dotted name in the model.
        The values of several layers are added.
    weight : float, default=0.1
        Factor of the penalty; 0 for no penalty.
    clip : float or None, default=0.5
        Limit of the penalty, see `RelativeFlatnessPenalty`.
    every : int or None, default=1
        Number of epochs between measurements, the last of which is at the end of training. None
        for no measurement. One takes a forward pass over the data.
    dataset : Dataset or None, default=None
        The samples to measure, which the trainer's collator puts together. None: the training
        data.

    Raises
    ------
    ImportError
        If transformers is not installed; ``pip install "relflat_sk[transformers]"`` installs it.
    ValueError
        If an argument is out of range. In training, if the trainer compiles the model or divides
        batches among devices, the model does not compute its loss itself from ``labels``, or its
        loss is another one than the criterion; or if the data cannot be read by number.

    See Also
    --------
    RelativeFlatnessPenalty : The penalty in a loop of your own.
    LightningFlatnessCallback : The same for PyTorch Lightning.

    Notes
    -----
    The trainer reports to TensorBoard, MLflow and others before it calls callbacks of users. For
    them to get the flatness, pass their callback after this one, with ``report_to="none"``:
    ``callbacks=[TransformersFlatnessCallback(), TensorBoardCallback()]``.

    Each process of a distributed training measures all samples. Gradient checkpointing goes
    together with a penalty at the last layer only.

    Examples
    --------
    >>> from relflat_sk.training import TransformersFlatnessCallback
    >>> flat = TransformersFlatnessCallback(weight=1.0)

    ``Trainer(model, args, train_dataset=data, callbacks=[flat]).train()`` trains with the penalty.
    """

    def __init__(
        self,
        criterion: Any = None,
        *,
        layer: Any = -1,
        weight: float = 0.1,
        clip: float | None = 0.5,
        every: int | None = 1,
        dataset: Any = None,
    ) -> None:
        self.criterion = criterion
        self._training = FlatTraining(layer, weight, clip, every, dataset)
        self._open = ExitStack()  # of a training
        self._pass: ExitStack | None = None  # of a forward pass that is recorded
        self._awaits_pass = False
        self._state: Callable[[], Any] = lambda: None
        self._checked = False
        self._penalties: list[Tensor] = []
        self._found: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check the training, forget an earlier one, and add the penalty to the steps."""
        self._open.close()
        self._checked, self._penalties, self._found = False, [], {}
        if not self._training.is_penalised:
            return
        if args.torch_compile:
            raise ValueError(
                "torch_compile=True: the trainer runs a compiled copy of the model, from which no "
                "penalty can be computed. Use torch_compile=False, or weight=0."
            )
        if args.n_gpu > 1:
            raise ValueError(
                f"the trainer divides each batch among {args.n_gpu} devices of one process. Start "
                "one process per device with torchrun or accelerate, or use weight=0."
            )
        model: nn.Module = kwargs["model"]
        # no event tells that a training has failed: its state then ends with the next one
        self._state = weakref.ref(state)
        # of several callbacks, the last to begin a pass ends it first
        for handle in (
            model.register_forward_pre_hook(self._begin_pass),
            model.register_forward_hook(
                self._end_pass, prepend=True, with_kwargs=True, always_call=True
            ),
        ):
            self._open.callback(handle.remove)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the next forward pass of the model return the loss with the penalty."""
        self._awaits_pass = True

    # a step of several batches has a forward pass for each
    on_substep_end = on_step_begin

    def _begin_pass(self, model: nn.Module, inputs: Any) -> None:
        """Record the first forward pass of a step."""
        if self._awaits_pass and self._state() is not None:
            self._awaits_pass = False
            self._pass = ExitStack()
            self._pass.enter_context(self._training.penalty.capture(model))

    def _end_pass(self, model: nn.Module, inputs: Any, named: Any, output: Any) -> Any:
        """Add the penalty to the loss in the output of a pass that was recorded."""
        recorded, self._pass = self._pass, None
        if recorded is None:
            return None
        if output is None:  # the model has failed
            with suppress(Exception):
                recorded.close()
            return None
        recorded.close()
        return self._with_penalty(model, output, named)

    def _with_penalty(self, model: nn.Module, output: Any, inputs: Mapping[str, Any]) -> Any:
        """Add the penalty to the loss in the output of the model."""
        labels = inputs.get("labels")
        loss = output.get("loss") if isinstance(output, Mapping) else output[0]
        if labels is None or not isinstance(loss, Tensor):
            raise ValueError(
                "the penalty is added to the loss that the model computes from `labels`, but the "
                "trainer computes the loss itself (label smoothing or compute_loss_func), or the "
                "data have no column `labels`."
            )
        logits = full_precision(
            primary_output(output if isinstance(output, Mapping) else output[1])
        )
        criterion = self._criterion(model)
        labels = next_labels(labels) if self._is_causal(model) else labels
        known = Loss(as_criterion(criterion), classes_last=True)  # as transformers has them
        logits = known.classes_second(logits, labels)
        penalty = self._training.penalty(criterion, logits, labels)
        with torch.no_grad():
            target = known.read_target(logits, labels).values
            plain, mean = loss.detach(), weighted_loss(known, logits, target, None)
        if not self._checked:
            _check_loss(criterion, float(plain), float(mean), labels, inputs)
            self._checked = True
        # some models divide the sum over a batch by the number of tokens of several batches
        share = torch.where(mean > 0, plain / mean, torch.ones_like(mean))
        self._penalties.append(penalty.detach())
        penalised = loss + share * penalty
        if isinstance(output, Mapping):
            output["loss"] = penalised  # type: ignore[index]
            return output
        return (penalised, *output[1:])

    def _criterion(self, model: Any) -> Any:
        """Return the loss that the model computes."""
        if self.criterion is not None:
            return self.criterion
        problem = getattr(getattr(model, "config", None), "problem_type", None)
        return _CRITERIA.get(problem, nn.CrossEntropyLoss)()

    def _is_causal(self, model: nn.Module) -> bool:
        """Return whether the labels of a token are those of the next one."""
        return self.criterion is None and is_causal_language_model(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the flatness at the end of an epoch, and ask the trainer for a log entry."""
        if not self._training.is_due(state.epoch, ends=control.should_training_stop):
            return
        model = kwargs["model"]
        rows = rows_in_order(
            kwargs["train_dataloader"],
            self._training.dataset,
            _split_labels,
            args.per_device_train_batch_size,
        )
        criterion = None if self._is_causal(model) else self._criterion(model)
        self._found["relative_flatness"] = self._training.measure(model, rows, criterion)
        control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add what was found since the last entry to the trainer's logs."""
        found, self._found = self._found, {}
        if self._penalties:
            found["flatness_penalty"] = float(torch.stack(self._penalties).mean())
            self._penalties = []
        state.log_history[-1].update(found)
        kwargs["logs"].update(found)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model alone."""
        self._open.close()


def _split_labels(batch: Any) -> tuple[dict[str, Any], Any]:
    """Return inputs and labels of a batch of the trainer's collator."""
    inputs = dict(batch)
    return inputs, inputs.pop("labels")


def _check_loss(
    criterion: Any, loss: float, mean: float, labels: Tensor, inputs: Mapping[str, Any]
) -> None:
    """Refuse a model whose loss is not the criterion, as a mean or as a sum over a step's items."""
    items = float(inputs.get("num_items_in_batch") or 0)
    counted = float((labels != IGNORED).sum())
    means = [mean, mean * counted / items] if items else [mean]
    if not any(abs(loss - expected) <= _ROUNDING * abs(expected) + 1e-6 for expected in means):
        raise ValueError(
            f"the model's loss is {loss:.6g}, but that of {criterion} on the same logits and "
            f"labels is {mean:.6g}. Pass the criterion that the model computes, without further "
            "terms, or use weight=0."
        )

"""The callback for Hugging Face's Trainer, against a plain loop with the same batches."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from relflat_sk import RelativeFlatnessPenalty, relative_flatness
from relflat_sk._network.borrowing import MathAttention

pytest.importorskip("transformers")

from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from relflat_sk.training import TransformersFlatnessCallback

DRAW = torch.Generator().manual_seed(0)
IDS = torch.randint(1, 20, (10, 6), generator=DRAW)
CLASSES = torch.randint(0, 3, (10,), generator=DRAW)
NUMBERS = torch.randn(10, generator=DRAW)
# each text has another number of tokens that count; the first has no prediction
COUNTS = (torch.arange(6) > 0) & (torch.arange(6) < torch.arange(10)[:, None] % 4 + 2)
TOKENS = IDS.masked_fill(~COUNTS, -100)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the trainer makes a folder for its output


def classifier(num_labels=3, hidden_dropout_prob=0.0, **kwargs):
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=8, initializer_range=0.5,
        num_labels=num_labels, attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=hidden_dropout_prob, **kwargs,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def language_model(vocab_size=20):
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=vocab_size, n_positions=8, n_embd=8, n_layer=1, n_head=2, initializer_range=0.5,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def rows(labels):
    return [{"input_ids": x, "labels": y} for x, y in zip(IDS, labels, strict=True)]


DATA = rows(CLASSES)


class InOrder(Trainer):
    """Does not shuffle."""

    def _get_train_sampler(self, *args):
        return None


def fit(model, data, *callbacks, trainer=InOrder, **kwargs):
    arguments = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    made = trainer(
        model,
        TrainingArguments("output", **arguments | kwargs),
        train_dataset=data,
        callbacks=list(callbacks),
    )
    made.train()
    return made


def entries(trainer, name):
    return [row[name] for row in trainer.state.log_history if name in row]


def train_by_hand(model, labels, penalty):
    """Two epochs with steps of two batches each, as the trainer combines them.

    A causal model returns the mean over the tokens of both batches, Bert that of each batch.
    Return the model, and the mean penalty of each epoch.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    batches, terms = list(zip(IDS.split(4), labels.split(4), strict=True)), []
    for step in [batches[:2], batches[2:]] * 2:
        n_tokens = sum((y != -100).sum() for _, y in step)
        for x, y in step:
            with penalty.capture(model):
                logits = model(input_ids=x).logits
            target = F.pad(y, (0, 1), value=-100)[:, 1:] if y.ndim == 2 else y
            share = (target != -100).sum() / n_tokens if y.ndim == 2 else 1
            mean = F.cross_entropy(logits.flatten(0, -2), target.flatten())
            term = penalty(criterion, logits, target)
            terms.append(term.item())
            (share * (mean + term)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, [sum(terms[:3]) / 3, sum(terms[3:]) / 3]


def assert_same(model, other):
    for found, wanted in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


PENALTY = {"weight": 5.0, "clip": 20.0}
MODELS = {"classifier": (classifier, CLASSES), "language model": (language_model, TOKENS)}


class Report(TrainerCallback):
    """Hears what is logged, as the user's own reporter does."""

    def __init__(self):
        self.heard = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.heard.append(dict(logs))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # its next name
@pytest.mark.parametrize("kind", MODELS)
def test_the_steps_are_those_of_a_plain_loop_with_the_penalty(kind):
    make, labels = MODELS[kind]
    model, callback, report = make(), TransformersFlatnessCallback(**PENALTY), Report()
    if kind == "language model":
        model.gradient_checkpointing_enable()
    trainer = fit(model, rows(labels), callback, report, gradient_accumulation_steps=2)
    by_hand, penalties = train_by_hand(make(), labels, RelativeFlatnessPenalty(**PENALTY))
    assert_same(model, by_hand)
    plain, _ = train_by_hand(make(), labels, RelativeFlatnessPenalty(weight=0.0))
    differences = [
        (a - b).abs().max() for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    assert max(differences) > 1e-3
    assert [row["epoch"] for row in trainer.state.log_history if "loss" in row] == [1, 2]
    criterion = None if kind == "language model" else nn.CrossEntropyLoss()
    flatness = relative_flatness(model, {"input_ids": IDS}, labels, criterion=criterion)
    assert entries(trainer, "relative_flatness")[1] == pytest.approx(flatness, rel=1e-5)
    assert entries(trainer, "flatness_penalty") == pytest.approx(penalties, rel=1e-5)
    for name in ("flatness_penalty", "relative_flatness"):
        assert [row[name] for row in report.heard if name in row] == entries(trainer, name)
    assert not model._forward_hooks


def test_a_language_model_may_read_as_many_tokens_as_it_has_classes():
    ids = IDS % IDS.shape[1]
    data = [{"input_ids": x, "labels": x} for x in ids]
    callback = TransformersFlatnessCallback(weight=1.0, clip=None)
    model = language_model(vocab_size=ids.shape[1])
    trainer = fit(model, data, callback, learning_rate=0.0, per_device_train_batch_size=len(ids))
    (penalty, *_), (flatness, *_) = (
        entries(trainer, name) for name in ("flatness_penalty", "relative_flatness")
    )
    assert penalty == pytest.approx(flatness / (2 * 8), rel=1e-5)


def test_a_criterion_of_ones_own_takes_the_logits_of_tokens_as_the_model_returns_them():
    def of_tokens(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    for criterion in (None, of_tokens):
        model = BertForTokenClassification(classifier().config)
        callback = TransformersFlatnessCallback(criterion=criterion)
        trainer = fit(model, rows(IDS % 3), callback, learning_rate=0.0)
        again = relative_flatness(
            model, {"input_ids": IDS}, IDS % 3, criterion=nn.CrossEntropyLoss()
        )
        assert entries(trainer, "relative_flatness") == pytest.approx([again, again], rel=1e-5)


def test_measuring_changes_neither_the_training_nor_its_random_state():
    trained = []
    for callbacks in ([], [TransformersFlatnessCallback(weight=0)]):
        model = classifier(hidden_dropout_prob=0.2)
        fit(model, DATA, *callbacks, trainer=Trainer)
        trained.append([*model.parameters(), torch.rand(3)])
    torch.testing.assert_close(*trained, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("labels", "arguments"),
    [(NUMBERS, {"num_labels": 1}), ((IDS[:, :3] > 9).float(), {"return_dict": False})],
    ids=["regression", "several labels, as a tuple"],
)
def test_other_problems_are_penalised_by_their_own_loss(labels, arguments):
    model = classifier(**arguments)
    trainer = fit(model, rows(labels), TransformersFlatnessCallback(clip=None), max_steps=2)
    criterion = nn.MSELoss() if labels.ndim == 1 else nn.BCEWithLogitsLoss()
    flatness = relative_flatness(model, {"input_ids": IDS}, labels, criterion=criterion)
    # the training ends within an epoch, and is measured there
    assert entries(trainer, "relative_flatness") == [pytest.approx(flatness, rel=1e-5)]
    assert entries(trainer, "flatness_penalty")[0] > 0


@pytest.mark.filterwarnings("ignore:.*is negative")  # the pooler is not at a minimum
def test_measurements_are_made_every_few_epochs_of_the_data_that_are_asked_for_or_never():
    model, some = classifier(), DATA[:4]
    callback = TransformersFlatnessCallback(layer="bert.pooler.dense", every=2, dataset=some)
    trainer = fit(model, DATA, callback, num_train_epochs=3)
    assert [r["epoch"] for r in trainer.state.log_history if "relative_flatness" in r] == [2, 3]
    data = {"input_ids": IDS[:4]}, CLASSES[:4]
    flatness = relative_flatness(
        model, *data, layer="bert.pooler.dense", criterion=nn.CrossEntropyLoss()
    )
    assert entries(trainer, "relative_flatness")[1] == pytest.approx(flatness, rel=1e-4)
    never = fit(model, DATA, TransformersFlatnessCallback(every=None), max_steps=1)
    assert not entries(never, "relative_flatness")


class Failing(BertForSequenceClassification):
    fails = True

    def forward(self, input_ids, labels):
        if self.fails:
            raise ArithmeticError
        return super().forward(input_ids, labels=labels)


class NoLoss(InOrder):
    """The user's own loss fails before the model runs."""

    def compute_loss(self, *args, **kwargs):
        raise ArithmeticError


class Stops(TrainerCallback):
    def on_step_begin(self, *args, **kwargs):
        raise ArithmeticError


@pytest.mark.parametrize("fails", ["model", "loss", "callback"])
def test_a_step_that_fails_leaves_nothing_behind(fails):
    model, callbacks = classifier(), [TransformersFlatnessCallback()]
    if fails == "model":
        model.__class__ = Failing
    if fails == "callback":
        callbacks.append(Stops())
    with pytest.raises(ArithmeticError):
        fit(model, DATA, *callbacks, trainer=NoLoss if fails == "loss" else InOrder)
    model.fails = False
    parts = [part for part in model.modules() if part is not model]
    assert not any(part._forward_hooks or "forward" in vars(part) for part in parts)
    batch = {"input_ids": IDS, "labels": CLASSES}
    assert model.train()(**batch).loss.item() == classifier().train()(**batch).loss.item()


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "removed"])
def test_a_trainer_whose_training_failed_can_train_again(kept):
    unmeasured = PENALTY | {"every": None}
    model, flat, stops = classifier(), TransformersFlatnessCallback(**unmeasured), Stops()
    trainer = fit(model, DATA, flat, max_steps=1)
    trainer.add_callback(stops)
    with pytest.raises(ArithmeticError):
        trainer.train()
    trainer.remove_callback(stops)
    if not kept:
        trainer.remove_callback(flat)
    trainer.train()
    n_logged = len(entries(trainer, "flatness_penalty"))
    assert n_logged == kept
    expected = classifier()
    again = fit(expected, DATA, TransformersFlatnessCallback(**unmeasured), max_steps=1)
    if not kept:
        again.pop_callback(TransformersFlatnessCallback)
    again.train()
    assert_same(model, expected)


def test_two_callbacks_leave_the_next_training_as_the_first():
    model = classifier()
    before = copy.deepcopy(model.state_dict())
    callbacks = [
        TransformersFlatnessCallback(layer=layer, every=None, **PENALTY)
        for layer in ("classifier", "bert.pooler.dense")
    ]
    trainer = fit(model, DATA, *callbacks, max_steps=2)
    first = copy.deepcopy(model)
    model.load_state_dict(before)
    trainer.train()
    assert_same(model, first)
    assert not MathAttention._open
    assert not [name for name, part in model.named_modules() if "forward" in vars(part)]


@pytest.mark.parametrize(
    ("callback", "arguments", "message"),
    [
        ({}, {"label_smoothing_factor": 0.1}, "the trainer computes the loss itself"),
        ({"criterion": nn.CrossEntropyLoss(label_smoothing=0.5)}, {}, "the model's loss is"),
    ],
    ids=["smoothing", "criterion"],
)
def test_trainings_without_a_penalty_are_refused(callback, arguments, message):
    with pytest.raises(ValueError, match=message):
        fit(classifier(), DATA, TransformersFlatnessCallback(**callback), **arguments)


@pytest.mark.parametrize(
    ("compiled", "n_gpu", "message"),
    [(True, 1, "runs a compiled copy"), (False, 2, "among 2 devices of one process")],
    ids=["compiled", "divided"],
)
def test_models_that_are_not_called_themselves_are_refused(compiled, n_gpu, message):
    args = SimpleNamespace(torch_compile=compiled, n_gpu=n_gpu)
    with pytest.raises(ValueError, match=message):
        TransformersFlatnessCallback().on_train_begin(args, None, None)
    TransformersFlatnessCallback(weight=0).on_train_begin(args, None, None)

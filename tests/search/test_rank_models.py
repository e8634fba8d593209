"""Tests of `rank_models`: the table of a search, for models that are trained already."""

import copy
import gc
import json
import math
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import joblib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from relflat_sk import (
    FlatnessScorer,
    FlatnessWarning,
    MinimaRankingDisplay,
    correlate_measures,
    granulated_kendall,
    measure,
    rank_minima,
    rank_models,
    relative_flatness,
)
from relflat_sk.search import _rank_models
from tests.search.examples import X_TEST, Y_TEST, X, Y, logistic, make_net, piped, plain_net

CE = nn.CrossEntropyLoss()
LOGISTIC = LogisticRegression(max_iter=500).fit(X, Y)
KAPPA = {"measure": "relative_flatness", "random_state": 0}
OF_MODULE = {"criterion": CE, **KAPPA}


def build():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.fixture(scope="module")
def steps():
    """State dicts of a network along its training."""
    torch.manual_seed(0)
    net, saved = build(), {}
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    for step in range(1, 31):
        optimizer.zero_grad()
        CE(net(torch.tensor(X)), torch.tensor(Y)).backward()
        optimizer.step()
        if step % 10 == 0:
            saved[f"step {step}"] = copy.deepcopy(net.state_dict())
    return saved


def loaded(weights):
    net = build()
    net.load_state_dict(weights)
    return net


@pytest.fixture(scope="module")
def expected(steps):
    """What each checkpoint's module alone gives."""
    nets = {name: loaded(weights) for name, weights in steps.items()}
    return {name: relative_flatness(net, X, Y, criterion=CE) for name, net in nets.items()}


def assert_ranked(table, expected):
    """Compare a table of checkpoints with the flatness of each, by name."""
    assert dict(zip(table["model"], table["relative_flatness"], strict=True)) == pytest.approx(
        expected, rel=1e-6
    )
    assert table["model"].tolist() == sorted(expected, key=expected.get)
    assert table["rank"].tolist() == [1, 2, 3]
    assert table["converged"].all()


def test_the_table_is_that_of_a_search():
    search = logistic(measure=["relative_flatness", "hessian_trace"]).fit(X, Y, X_TEST, Y_TEST)
    models = (search.get_estimator(number) for number in range(3))
    table = rank_models(
        models, X, Y, measure=["relative_flatness", "hessian_trace"], X_test=X_TEST,
        y_test=Y_TEST, random_state=0,
    )  # fmt: skip
    others = [name for name in table.columns if name not in {"model", "param_random_state"}]
    assert others == list(search.minima_.columns)
    given = search.minima_.drop(columns=["seconds"])  # nobody knows how long training took
    for name in given:
        if given[name].dtype == float:
            np.testing.assert_allclose(table[name], given[name], rtol=1e-12, err_msg=name)
        else:
            assert table[name].tolist() == given[name].tolist(), name
    assert table["seconds"].isna().all()
    assert table.attrs == search.minima_.attrs


def test_statistics_and_displays_take_the_table():
    models = [
        make_net(batch_size=size, lr=lr, random_state=0).fit(X, Y)
        for size in (8, 16)
        for lr in (0.05, 0.1)
    ]
    table = rank_models(models, X, Y, X_test=X_TEST, y_test=Y_TEST, **KAPPA)
    assert {"param_batch_size", "param_lr"} == {n for n in table if n.startswith("param_")}
    assert set(correlate_measures(table)["measure"]) == {"relative_flatness", "train_loss"}
    assert {"psi_batch_size", "psi_lr"} <= set(granulated_kendall(table, target="test_loss"))
    assert rank_minima(table, "test_loss")["test_loss"].is_monotonic_increasing
    display = MinimaRankingDisplay.from_minima(table)
    plt.close("all")
    assert display.by == "relative_flatness"


def test_models_of_several_kinds_have_columns_for_what_differs_within_a_kind():
    models = [
        LogisticRegression(C=0.5, max_iter=500).fit(X, Y),
        LogisticRegression(C=1.0, max_iter=500).fit(X, Y),
        make_net(random_state=0).fit(X, Y),
        make_net(random_state=0, module__activation="tanh").fit(X, Y),
        make_net(random_state=0, module__hidden_layer_sizes=(4, 3), optimizer=torch.optim.SGD).fit(
            X, Y
        ),
        piped(LogisticRegression(max_iter=500)).fit(X, Y),  # one of its kind
    ]
    table = rank_models(models, X, Y, **KAPPA).set_index("trial").sort_index()
    names = [name for name in table if name.startswith("param_")]
    # all kinds have verbose, 0 or False, and two of them random_state; the first net does not say
    # that its activation is the default
    of_nets = ["random_state", "verbose", "optimizer"]
    of_nets += ["module__hidden_layer_sizes", "module__activation"]
    of_nets = [f"param_{name}" for name in of_nets]
    assert names == ["param_C", *of_nets]
    assert table["param_C"].tolist()[:2] == [0.5, 1.0]
    assert table["param_module__hidden_layer_sizes"][4] == "(4, 3)"  # as in a search
    assert table["param_optimizer"].tolist()[3:5] == ["Adam", "SGD"]


def test_models_of_different_losses_are_not_compared_in_silence():
    models = [LogisticRegression(max_iter=500), Ridge(), LogisticRegression(class_weight={0: 9})]
    models = [one.fit(X, Y) for one in models]
    entropy, variance = np.log(3), np.var(Y)
    match = f"the models, from {variance:.4g} of '1' to {entropy:.4g} of '0'. They have different"
    with pytest.warns(FlatnessWarning, match=match):
        rank_models(models[:2], X, Y, **KAPPA)
    with pytest.warns(FlatnessWarning, match="losses, weights of classes or units"):
        rank_models(models[::2], X, Y, **KAPPA)


@pytest.mark.parametrize("as_held", [TensorDataset, lambda *data: DataLoader(TensorDataset(*data))])
def test_held_out_data_may_be_of_another_type_than_the_training_data(as_held):
    held = as_held(torch.tensor(X_TEST), torch.tensor(Y_TEST))
    of_search, expected = (
        logistic().fit(X, Y, *data).minima_ for data in ([held], [X_TEST, Y_TEST])
    )
    of_models = rank_models([LOGISTIC], X, Y, X_test=held, **KAPPA)
    np.testing.assert_allclose(of_search["test_loss"], expected["test_loss"], rtol=1e-6)
    np.testing.assert_allclose(
        of_models["test_loss"], log_loss(Y_TEST, LOGISTIC.predict_proba(X_TEST)), rtol=1e-6
    )


def test_a_search_is_ranked_as_its_best_estimator():
    """Its own predictions may be the mean of several networks."""
    search = logistic().fit(X, Y)
    best, other = search.best_estimator_, search.get_estimator(search.minima_["trial"][2])
    table = rank_models([search, best, other], X, Y, **KAPPA).set_index("trial")
    columns = ["train_loss", "train_score", "relative_flatness"]
    np.testing.assert_array_equal(*table.loc[[0, 1], columns].to_numpy())


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_estimators_of_every_kind_have_a_record_of_their_training():
    models = {
        "logistic": LogisticRegression(max_iter=500).fit(X, Y),
        "mlp": MLPClassifier((5,), max_iter=40, random_state=0).fit(X, Y),
        "goal": piped(make_net()).fit(X, Y),
        "plain": plain_net(train_split=None).fit(X, Y),
    }
    with pytest.warns(FlatnessWarning, match="2 of 4 models are no minima"):
        table = rank_models(models, X, Y, **KAPPA).set_index("model")
    assert table.loc[["logistic", "goal"], "ended_by"].tolist() == ["solver", "goal"]
    assert "max_iter=40" in table.loc["mlp", "reason"]
    assert "after 3 epochs" in table.loc["plain", "reason"]
    assert table["relative_flatness"].notna().all()


# -- checkpoints -----------------------------------------------------------------------------------


def save_loop(weights, path):
    torch.save({"model_state_dict": weights, "step": 3}, path)


def save_lightning(weights, path):
    prefixed = {f"net.{key}": value for key, value in weights.items()}
    torch.save({"state_dict": prefixed | {"loss.weight": torch.ones(3)}, "epoch": 1}, path)


def save_safely(weights, path):
    pytest.importorskip("safetensors.torch").save_file(weights, path)


def save_shards(weights, index):
    parts = {key: f"part-{key[0]}.bin" for key in weights}
    for part in set(parts.values()):
        some = {key: value for key, value in weights.items() if parts[key] == part}
        torch.save(some, index.parent / part)
    index.write_text(json.dumps({"weight_map": parts}), encoding="utf-8")


FORMS = {  # files in which torch, loops, Lightning, safetensors and transformers save weights
    "{}.pt": torch.save,
    "{}.pth": save_loop,
    "{}.ckpt": save_lightning,
    "{}.safetensors": save_safely,
    "checkpoint-{}/pytorch_model.bin": torch.save,
    "checkpoint-{}/model.safetensors": save_safely,
    "checkpoint-{}/pytorch_model.bin.index.json": save_shards,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_checkpoint_is_read(form, steps, expected, tmp_path):
    for name, weights in steps.items():
        path = tmp_path / form.format(name.removeprefix("step "))
        if path.parent != tmp_path:
            path.parent.mkdir()
            torch.save({"lr": 0.1}, path.parent / "training_args.bin")
        FORMS[form](weights, path)
    module = build()
    table = rank_models(tmp_path, X, Y, module=module, **OF_MODULE)
    paths = sorted(tmp_path.iterdir())
    assert_ranked(table, dict(zip(map(str, paths), expected.values(), strict=True)))
    named = rank_models(dict(zip(expected, paths, strict=True)), X, Y, module=module, **OF_MODULE)
    assert_ranked(named, expected)
    assert table.sort_values("trial")["model"].tolist() == list(map(str, paths))


def test_checkpoints_are_in_the_order_of_their_numbers(steps, tmp_path):
    for number in (90, 100, 1000):
        torch.save(steps["step 10"], tmp_path / f"step-{number}.pt")
    table = rank_models(tmp_path, X, Y, module=build(), **OF_MODULE)
    assert [name[-8:] for name in table["model"]] == ["ep-90.pt", "p-100.pt", "-1000.pt"]


def test_state_dicts_of_a_net(steps, expected):
    net = make_net(module__hidden_layer_sizes=(5,), module__activation="tanh").fit(X, Y)
    keys = list(net.module_.state_dict())
    before = copy.deepcopy(net.module_.state_dict())
    renamed = {
        name: dict(zip(keys, weights.values(), strict=True)) for name, weights in steps.items()
    }
    table = rank_models(renamed, X, Y, module=net, X_test=X_TEST, y_test=Y_TEST, **KAPPA)
    assert_ranked(table, expected)
    assert table["ended_by"].eq("").all()  # the record of the net is of other weights
    scores = [
        (loaded(one)(torch.tensor(X)).argmax(1).numpy() == Y).mean() for one in steps.values()
    ]
    assert table.sort_values("trial")["train_score"].tolist() == pytest.approx(scores)
    torch.testing.assert_close(net.module_.state_dict(), before, rtol=0, atol=0)


def test_a_tied_weight_may_have_one_of_its_names(steps):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(torch.tanh(self.embed(x)))

    ids = torch.arange(6)
    net = Tied()
    weights = {"embed.weight": 2 * torch.eye(6, 4)}
    table = rank_models([weights], ids, ids, module=net, **OF_MODULE)
    net.load_state_dict(weights, strict=False)
    assert table["relative_flatness"][0] == relative_flatness(net, ids, ids, criterion=CE)


def test_an_iterator_holds_one_model_at_a_time(steps):
    alive = weakref.WeakSet()

    def models():
        for weights in steps.values():
            if alive:  # by a cycle only
                gc.collect()
            assert not alive
            net = loaded(weights)
            alive.add(net)
            yield net
            del net

    assert len(rank_models(models(), X, Y, **OF_MODULE)) == 3


@pytest.mark.parametrize("ends", ["well", "measure", "weights"])
def test_the_module_gets_its_own_weights_back(ends, steps):
    module = build().train()
    before = copy.deepcopy(module.state_dict())

    def interrupting(model, inputs, labels):
        assert torch.equal(model[0].weight, steps["step 10"]["0.weight"])
        raise KeyboardInterrupt

    items = [{"0.weight": torch.ones(5, 4)}] if ends == "weights" else [steps["step 10"]]
    options = OF_MODULE | ({"measure": interrupting} if ends == "measure" else {})
    errors = {"measure": KeyboardInterrupt, "weights": ValueError}
    with pytest.raises(errors[ends]) if ends in errors else nullcontext():
        rank_models(items, X, Y, module=module, **options)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert module.training
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.filterwarnings("ignore:.*models are no minima:relflat_sk.FlatnessWarning")
def test_by_default_models_of_all_depths_are_compared_at_equal_loss(steps):
    scaled = {f"x {c}": scale_head(steps["step 30"], c) for c in (0.5, 1, 30)}
    scorer = FlatnessScorer("comparable_flatness", measure_params={"at_loss": 0.3})
    options = {"module": build(), "criterion": CE, "measure": scorer}
    table = rank_models(scaled | {"first": build().state_dict()}, X, Y, **options)
    assert table["comparable"].tolist() == [True, True, True, False]
    depths = table["depth"][:3]
    assert depths.max() > 3 * depths.min()  # more than a band
    values = table["comparable_flatness"][:3]
    assert values.max() == pytest.approx(values.min(), rel=1e-3)
    assert "no better than a constant" in table["reason"][3]


def scale_head(weights, factor):
    """Scale the outputs of a network."""
    return {key: factor * one if key[0] == "2" else one for key, one in weights.items()}


# -- models without a value ------------------------------------------------------------------------


@pytest.mark.parametrize(("n_right", "n_bad"), [(1, 0), (0, 3), (2, 3), (0, 0)])
@pytest.mark.filterwarnings("ignore:.*models are no minima:relflat_sk.FlatnessWarning")
def test_models_are_compared_at_a_loss_that_half_of_them_reach(n_right, n_bad, recwarn):
    x = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
    bias = {"right": 0.0, "wrong for two": -1.0, "bad": -9.0}  # the last one has not learned
    counts = {"right": n_right, "wrong for two": 2, "bad": n_bad}
    models = {
        f"{name} {i}": {"weight": torch.tensor([[0.0], [10.0 + i]]), "bias": torch.tensor([0, at])}
        for name, at in bias.items()
        for i in range(counts[name])
    }
    y = (x[:, 0] > 0).astype(int)
    net, share = nn.Linear(1, 2), None
    if n_right < 2:  # by trying many temperatures of the better one of two that err
        net.load_state_dict(models["wrong for two 1"])
        z, betas = net(torch.tensor(x)).detach(), torch.logspace(-2, 1, 2000)
        lowest = min(float(CE(beta * z, torch.tensor(y))) for beta in betas) / np.log(2)
        share = math.ceil(100 * lowest) / 100
    options = {"module": net, "criterion": CE}
    tables = (
        rank_models(models, x, y, **options),
        rank_models(iter(models.values()), x, y, **options),
    )
    texts = [str(one.message) for one in recwarn]
    texts = [text for text in texts if "which half of them reach" in text]
    assert len(texts) == (0 if share is None else 2)
    assert [table.attrs.get("at_loss") for table in tables] == [share, None]
    assert tables[0]["comparable"].sum() == n_right + (share is not None)
    assert tables[1]["comparable"].sum() == n_right
    for name, found in zip(tables[0]["model"], tables[0]["comparable_flatness"], strict=True):
        if np.isfinite(found):
            net.load_state_dict(models[name])
            expected = measure("comparable_flatness", net, x, y, criterion=CE, at_loss=share or 0.1)
            assert found == pytest.approx(expected)
    if share:
        assert f"They are compared at {share}, which" in texts[0]
        assert f"Pass a list in place of an iterator, and they are compared at {share}," in texts[1]
    own = FlatnessScorer("comparable_flatness", measure_params={"at_loss": 0.1})
    table = rank_models(models, x, y, measure=own, **options)  # as the user says
    assert table["comparable"].sum() == n_right


def test_models_without_a_value_rank_last_with_a_reason(steps):
    dead, broken = build(), build()
    nn.init.zeros_(dead[2].weight)
    nn.init.constant_(broken[2].weight, torch.nan)
    without = nn.Flatten()
    models = {"dead": dead, "good": loaded(steps["step 30"]), "nan": broken, "none": without}
    with pytest.warns(FlatnessWarning, match="3 of 4 models are no minima") as warned:
        table = rank_models(models, X, Y, **OF_MODULE).set_index("model")
    assert "the training loss is not finite" in str(warned[-1].message)
    assert table.index[0] == "good"
    assert "no better than a constant" in table.loc["dead", "reason"]
    assert "not finite" in table.loc["nan", "reason"]
    assert table.loc["none", "state"] == "failed"
    assert "LayerNotFoundError" in table.loc["none", "reason"]
    assert table.loc[["dead", "nan", "none"], "depth"].isna().tolist() == [False, True, True]


def test_a_model_that_cannot_be_loaded_has_a_row_with_the_reason(steps, expected, tmp_path):
    bad = {"missing": tmp_path / "none.pt", "other": {"0.weight": torch.ones(5, 4)}, "empty": None}
    with pytest.warns(FlatnessWarning, match="3 of 6 models are no minima"):
        table = rank_models({**bad, **steps}, X, Y, module=build(), **OF_MODULE)
    assert_ranked(table[:3], expected)
    reasons = table.set_index("model")["reason"]
    assert reasons["missing"].startswith("FileNotFoundError")
    assert reasons["other"].startswith("ValueError: the weights of 'other' are not those of module")
    assert reasons["empty"].startswith("TypeError: a model of type NoneType")


def test_models_may_share_the_weights_of_the_module(steps, expected):
    module = loaded(steps["step 30"])
    models = {
        "step 10": steps["step 10"],
        "step 20": steps["step 20"],
        "step 30": module.state_dict(),
    }
    assert_ranked(rank_models(models, X, Y, module=module, **OF_MODULE), expected)
    models["step 30"] = module
    assert_ranked(rank_models(models, X, Y, module=module, **OF_MODULE), expected)


MISSPELT = FlatnessScorer(measure_params={"n_probs": 3})


@pytest.mark.parametrize(
    ("models", "arguments", "error", "match"),
    [
        ([], {}, ValueError, "models is empty"),
        (build(), {}, TypeError, "models is a single Sequential"),
        (build().state_dict(), {}, TypeError, "models is a single OrderedDict"),
        (LogisticRegression(), {}, TypeError, "models is a single LogisticRegression"),
        (3, {}, TypeError, "models must be a dict, a list or an iterator"),
        ([build().state_dict()], {}, ValueError, "'0' are weights, and need the network"),
        ([build().state_dict()], {"module": MLPClassifier()}, TypeError, "must be a torch module"),
        ([build()], {"criterion": None}, ValueError, "criterion is needed for a bare module"),
        ([build()], {"measure": FlatnessScorer(layer="5")}, ValueError, "'0': layer='5' cannot be"),
        ([build()], {"X_test": X[:, :2], "y_test": Y}, ValueError, "X_test and y_test cannot"),
        ([LOGISTIC], {"X_test": X[:, :2], "y_test": Y}, ValueError, "as input. Give data like X"),
        ([build()], {"y_test": Y}, ValueError, "X_test and y_test go together"),
        ([build()], {"X_test": X}, ValueError, "X_test and y_test go together"),
        ([build()], {"measure": []}, ValueError, r"measure must be a name, .* got \[\]. See"),
        ([build()], {"memory": __file__}, ValueError, "memory must be a folder .*Not a directory"),
        ([build()], {"measure": MISSPELT}, TypeError, "'n_probs' is no argument"),
    ],
)
def test_what_cannot_be_ranked_is_refused(models, arguments, error, match):
    with pytest.raises(error, match=match):
        rank_models(models, X, Y, **{**OF_MODULE, **arguments})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w: {"0.weight": w["0.weight"]}, "they lack 3: '0.bias', '2.bias', '2.weight'"),
        (lambda w: w | {"4.bias": w["2.bias"]}, "they have further 1: '4.bias'"),
        (lambda w: {"a": w["0.bias"]}, "lack 4: .* and have further 1: 'a'"),
        (
            lambda w: w | {"2.weight": torch.ones(3, 9)},
            "(?s)do not fit module: .*size mismatch for 2.weight",
        ),
        (
            lambda w: {f"{start}.{key}": one for start in "ab" for key, one in w.items()},
            r"in several ways, under the names \['a.', 'b.'\]",
        ),
    ],
)
def test_weights_of_another_network_are_refused(change, match, steps):
    with pytest.raises(ValueError, match=match):
        rank_models({"one": change(steps["step 10"])}, X, Y, module=build(), **OF_MODULE)


def test_files_without_weights_are_refused(tmp_path):
    torch.save(
        {"state_dict": build().state_dict(), "other": LogisticRegression()}, tmp_path / "a.pt"
    )
    torch.save([1, 2], tmp_path / "b.pt")
    torch.save(LogisticRegression(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    whole = (tmp_path / "a.pt").read_bytes()
    for name, content in {"half.pt": whole[:999], "text.pt": b"hello", "none.pt": b""}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "empty").mkdir()
    for name, match in {
        "a.pt": r"than tensors \(sklearn.linear_model._logistic.LogisticRegression\), and",
        "old.pt": "(?s)than tensors, and loading these may run code.*no file of torch.save, too",
        **dict.fromkeys(("half.pt", "text.pt", "none.pt"), "no file of torch.save, or was not"),
        "b.pt": "holds no state dict, but list",
        "empty": "is no checkpoint",
    }.items():
        with pytest.raises(ValueError, match=match):
            rank_models([tmp_path / name], X, Y, module=build(), **OF_MODULE)
    with pytest.raises(ValueError, match="there are no checkpoints in"):
        rank_models(tmp_path / "empty", X, Y, module=build(), **OF_MODULE)
    with pytest.raises(FileNotFoundError):
        rank_models([tmp_path / "c.pt"], X, Y, module=build(), **OF_MODULE)
    pytest.importorskip("safetensors")
    (tmp_path / "d.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="no file of safetensors, or was not written to its end"):
        rank_models([tmp_path / "d.safetensors"], X, Y, module=build(), **OF_MODULE)


# -- adapters of PEFT ------------------------------------------------------------------------------


@pytest.fixture
def adapters(tmp_path):
    """A base network, a network with an adapter, and three saved adapters."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = build()
    config = peft.LoraConfig(target_modules=["0", "2"], r=2)
    adapted = peft.get_peft_model(copy.deepcopy(base), config)
    for i in (1, 2, 3):
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, std=i / 2)
        adapted.save_pretrained(tmp_path / f"checkpoint-{i}")
    return base, adapted, tmp_path


@pytest.mark.filterwarnings("ignore:.*models are no minima:relflat_sk.FlatnessWarning")
def test_adapters_on_a_base_and_in_a_network_with_an_adapter(adapters):
    peft = pytest.importorskip("peft")
    base, adapted, folder = adapters
    parts = ["", ".base_layer", ".lora_A.default", ".lora_B.default"]
    for layer in [f"base_model.model.2{part}" for part in parts]:
        tables = []
        for module in (base, adapted):
            before = copy.deepcopy(module.state_dict())
            options = {**OF_MODULE, "measure": FlatnessScorer(layer=layer)}
            tables.append(rank_models(folder, X, Y, module=module, **options))
            torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
        assert tables[0].equals(tables[1])
        table = tables[0].sort_values("trial")
        for i, found in enumerate(table["relative_flatness"], start=1):
            model = peft.PeftModel.from_pretrained(copy.deepcopy(base), folder / f"checkpoint-{i}")
            where = layer
            if layer == "base_model.model.2":
                model, where = model.merge_and_unload(), "2"
            one = relative_flatness(model, X, Y, layer=where, criterion=CE)
            assert found == pytest.approx(one, rel=1e-4), layer
    assert all(parameter.requires_grad for parameter in base.parameters())
    assert not any(hasattr(part, "lora_A") for part in base)


def test_an_adapter_of_another_shape_is_refused(adapters):
    peft = pytest.importorskip("peft")
    base, _, folder = adapters
    other = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(target_modules=["0"], r=2))
    with pytest.raises(ValueError, match="have further 2: .*lora_A"):
        rank_models(folder, X, Y, module=other, **OF_MODULE)


# -- interrupted, and continued --------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch):
    """Count the models that are measured, and press Ctrl-C at the number `end_at`."""
    found = SimpleNamespace(count=0, end_at=None)
    record = _rank_models.record_measures

    def counting(*args):
        found.count += 1
        if found.count == found.end_at:
            raise KeyboardInterrupt
        return record(*args)

    monkeypatch.setattr(_rank_models, "record_measures", counting)
    return found


@pytest.mark.parametrize(
    ("error", "why"),
    [(OSError("disk"), "models ended with OSError: disk"), (KeyboardInterrupt(), "interrupted")],
)
def test_the_table_has_what_was_measured_if_the_call_ends_early(error, why, steps):
    def failing(n):
        yield from list(steps.values())[:n]
        raise error

    options = {"module": build(), **OF_MODULE}
    with pytest.warns(FlatnessWarning, match=f"^{why}: the table has the 2 models"):
        table = rank_models(failing(2), X, Y, **options)
    assert table.attrs["ended"] == why
    assert table.equals(rank_models(list(steps.values())[:2], X, Y, **options))
    with pytest.raises(type(error)):
        rank_models(failing(0), X, Y, **options)


@pytest.mark.parametrize("random_state", [0, None])
def test_a_call_with_the_same_memory_goes_on(random_state, steps, measured, tmp_path, caplog):
    probed = FlatnessScorer(layer=0, measure_params={"method": "hutchinson", "n_probes": 3})
    options = {"criterion": CE, "measure": probed, "random_state": random_state}

    def call(models=steps, memory=tmp_path, **changes):
        measured.count = 0
        return rank_models(models, X, Y, module=build(), memory=memory, **options | changes)

    measured.end_at = 3
    with pytest.warns(FlatnessWarning, match="the 2 models .* goes on from here, with the same"):
        call()
    measured.end_at = None
    table = call()
    assert measured.count == 1
    again = call(memory=joblib.Memory(str(tmp_path), verbose=0))
    assert measured.count == 0
    pd.testing.assert_frame_equal(again, table)
    assert again.attrs == table.attrs
    next(tmp_path.rglob("_call/*/output.pkl")).write_bytes(b"cut off")
    pd.testing.assert_frame_equal(call(), table)
    assert measured.count == 1
    assert "Exception while loading results" in caplog.text
    assert call(memory=None).equals(table) == (random_state == 0)
    other = FlatnessScorer(layer=0, measure_params={"method": "hutchinson", "n_probes": 2})
    swapped = dict(zip(steps, list(steps.values())[::-1], strict=True))
    for change in (
        {"random_state": 1},
        {"measure": other},
        {"criterion": nn.CrossEntropyLoss(label_smoothing=0.1)},
        {"sample_weight": np.arange(len(X))},
        {"X_test": X_TEST, "y_test": Y_TEST},
    ):
        call(**change)
        assert measured.count == 3, change
    call(swapped)
    assert measured.count == 2  # the one in the middle has kept its name
    with pytest.raises(ValueError, match="'memory' should be None"):
        call(memory=3)


class Applied(nn.Module):
    """A network with one hidden layer, and a function as an attribute."""

    def __init__(self, net, function):
        super().__init__()
        self.net, self.function = net, function

    def forward(self, x):
        return self.net[2](self.function(self.net[0](x)))


def test_a_memory_knows_all_that_a_network_reads_and_does(steps, measured, tmp_path):
    """Also behind transformers of a pipeline, in a data set, in functions and in hooks."""
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500)).fit(X, Y)
    other = copy.deepcopy(model)
    other[0].scale_ *= 2
    data = [torch.tensor(X), torch.tensor(X)]
    data[1][20] += 3
    net = loaded(steps["step 30"])
    calls = [({"a": one}, X, Y, None) for one in (model, other)]
    calls += [({"a": net}, TensorDataset(x, torch.tensor(Y)), None, CE) for x in data]
    hooked = loaded(steps["step 30"])
    hooked.register_forward_hook(lambda module, args, output: 2 * output)
    others = (hooked, *(Applied(net, one) for one in (torch.relu, torch.tanh, lambda x: x)))
    calls += [({"a": one}, X, Y, CE) for one in (net, *others)]
    for *arguments, criterion in calls:
        expected = rank_models(*arguments, criterion=criterion, **KAPPA)
        for _ in range(2):
            found = rank_models(*arguments, criterion=criterion, memory=tmp_path, **KAPPA)
            pd.testing.assert_frame_equal(found, expected)
    assert measured.count == 2 * len(calls)  # without the memory, and once with it


@pytest.mark.filterwarnings("ignore:fewer than half:relflat_sk.FlatnessWarning")
@pytest.mark.filterwarnings("ignore:.*models are no minima:relflat_sk.FlatnessWarning")
def test_an_interrupted_second_round_leaves_the_first(measured):
    x = np.linspace(-1, 1, 40, dtype=np.float32)[:, None]
    head = {"bias": torch.tensor([0.0, -1.0])}  # wrong for some, whatever its temperature
    models = [{"weight": torch.tensor([[0.0], [w]]), **head} for w in (10.0, 11.0)]
    options = {"module": nn.Linear(1, 2), "criterion": CE}
    for end_at in (4, None):
        measured.count, measured.end_at = 0, end_at
        match = "has the 2 models .* compared at 0.1 of the" if end_at else "fewer than half"
        with pytest.warns(FlatnessWarning, match=match):
            table = rank_models(models, x, (x[:, 0] > 0).astype(int), **options)
        assert len(table) == 2
        assert table["comparable"].sum() == (0 if end_at else 1)  # half of them
        assert ("at_loss" in table.attrs) == (end_at is None)


def test_a_bar_shows_the_models(steps, capsys):
    rank_models(steps, X, Y, module=build(), verbose=1, **OF_MODULE)
    assert "3/3" in capsys.readouterr().err

"""Tests of `FlatMinimaSearch.report`: one page, nothing from outside, sorted by a click."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import optuna
import pytest
from sklearn import config_context
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression

from tests.search import examples
from tests.search.examples import X_TEST, Y_TEST, X, Y, logistic, make_net, make_search, piped

pytestmark = examples.NO_MINIMA

NASTY = '<script>alert(1)</script> & "quotes"'
BROWSER = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None
)


class Fails(LogisticRegression):
    def fit(self, X, y):
        if self.C == 10.0:
            raise RuntimeError(NASTY)
        return super().fit(X, y)


class Page(HTMLParser):
    """Collects tags, the cells of each table, and what the page would load."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.tables, self.loads, self.open = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in {"meta", "img", "br"}:
            self.open.append(tag)
        self.loads += [value for name, value in attrs if name in {"src", "href"}]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in {"td", "th"}:
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "table" in self.open and self.open[-1] in {"td", "th", "data"}:
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def search():
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {"C": [0.3, 0.5, 1.0, 10.0], "tol": [1e-4]}
    return logistic(space, Fails(max_iter=1000)).fit(X, Y, X_TEST, Y_TEST)


@pytest.fixture(scope="module")
def text(search, tmp_path_factory):
    path = search.report(tmp_path_factory.mktemp("report") / "minima.html")
    return path.read_text(encoding="utf-8")


def test_the_page_holds_everything(search, text):
    page, minima = Page(text), search.minima_
    assert page.open == []
    (header, *rows), correlations, settings, estimator, versions = page.tables
    assert header[:2] == ["rank", "trial"]
    assert set(header) == set(minima.columns)
    assert [row[0] for row in rows] == ["1", "2", "3", "4"]
    flatness = [f"{value:.4g}" for value in minima["relative_flatness"][:3]]
    assert [row[header.index("relative_flatness")] for row in rows] == [*flatness, ""]
    assert {"relative_flatness", "train_loss"} == {row[0] for row in correlations[1:]}
    assert ["refit", "mean"] in settings
    assert "torch" in [name for name, _ in versions]
    assert ["class_weight", "None"] in estimator
    assert ["max_iter", "1000"] in estimator
    assert not {"steps", "estimator"} & {name for name, _ in settings}
    assert page.tags.count("img") == 3
    averaged = sorted(minima["trial"][minima["state"] == "complete"])
    for sentence in (
        "trained once on all the data",
        "3 of them are minima that are ranked. The flattest is trial 0, with C = 0.3",
        f"The search predicts with the mean of 3: trials {', '.join(map(str, averaged))}.",
    ):
        assert sentence in text
    # it loads nothing, and runs nothing that a candidate wrote
    assert text.startswith("<!DOCTYPE html>")
    assert "default-src 'none'" in text
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.loads)
    assert NASTY not in text
    assert page.tags.count("script") == 1
    assert f"RuntimeError: {NASTY}" in rows[3]


def net_search(**parameters):
    net = make_net(callbacks=None, callbacks__print_log=None, **parameters)
    space = {"net__lr": [0.05, 2e-4], "net__batch_size": [8, 16], "scale__copy": [True]}
    return make_search(piped(net), {**space, "lr_scaling": ["linear"]}).fit(X, Y)


def test_goal_depth_and_what_was_left_out():
    search = net_search(max_epochs=50)
    text, minima = search.report(), search.minima_
    low, high = sorted(minima["depth"][:2])
    trials = ", ".join(map(str, sorted(minima["trial"][2:])))
    reason = "training stopped before a training loss of 0.0549 or a plateau was reached"
    for sentence in (
        "&#x27;auto&#x27;. What ended the training of minima: goal 2.",
        f"have depths from {low:.3g} to {high:.3g}, which are training losses from",
        f"<li>2 x {reason}, after 50 epochs (trials {trials})</li>",
    ):
        assert sentence in text
    assert text.count("<li>") == 1
    # three plots are of minima and parameters, one of trainings
    page = Page(text)
    assert page.tags.count("img") == 3
    settings = dict(page.tables[-2])
    assert settings["net__module__hidden_layer_sizes"] == "(6,)"
    assert settings["net__criterion"] == "torch.nn.modules.loss.CrossEntropyLoss"
    assert not any("callbacks__" in name for name in settings)  # those that skorch adds
    # names of parameters lose the prefix of the pipeline
    assert {"param_lr", "param_scale__copy", "param_scaled_lr"} <= set(minima.columns)
    assert "param_net__lr" in search.cv_results_


@pytest.mark.filterwarnings("ignore:no candidate converged")
def test_a_report_without_any_minimum():
    text = net_search(max_epochs=2).report()
    assert "None of them is a minimum. The deepest is trial" in text
    assert Page(text).tags.count("img") == 1


def test_a_page_needs_a_fit_a_folder_and_matplotlib(search, tmp_path, monkeypatch):
    with pytest.raises(NotFittedError):
        logistic().report("minima.html")
    with pytest.raises(FileNotFoundError, match="new/minima.html"):
        search.report(tmp_path / "new" / "minima.html")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "relflat_sk\[plot\]"'):
        search.report(tmp_path / "minima.html")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("storage", "shown"),
    [
        ("postgresql://me:secret@there/minima", "postgresql://me:***@there/minima"),
        (optuna.storages.InMemoryStorage(), "InMemoryStorage"),
    ],
)
def test_passwords_are_not_shown(storage, shown, search, monkeypatch):
    monkeypatch.setattr(search, "storage", storage)
    settings = [row for table in Page(search.report()).tables for row in table]
    assert ["storage", shown] in settings


def test_a_notebook_shows_the_flattest_minima_of_a_fitted_search(search):
    def shown(search):
        return search._repr_mimebundle_()["text/html"]

    assert "trial 0" not in shown(clone(search))
    assert "The flattest is trial 0, with C = 0.3" in shown(search)
    for name in ("relative_flatness", "train_loss", "converged"):
        assert f"<th>{name}</th>" in shown(search)
    by_trace = logistic(measure="hessian_trace").fit(X, Y)
    assert "<th>hessian_trace</th>" in shown(by_trace)
    with config_context(display="text"):
        assert list(search._repr_mimebundle_()) == ["text/plain"]


# clicks on the ranks first: sorting is stable; then once, and once again
CLICKS = """
const table = document.querySelector("table"), buttons = table.querySelectorAll("th button");
const found = COLUMNS.map((column) => [column, column].map((_, again) => {
  if (!again) buttons[0].click();
  buttons[column].click();
  return {
    state: buttons[column].closest("th").getAttribute("aria-sort"),
    ranks: [...table.tBodies[0].rows].map((row) => Number(row.cells[0].textContent)),
  };
}));
document.body.innerHTML = `<pre>${JSON.stringify(found)}</pre>`;
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
def test_a_click_sorts(search, text, tmp_path):
    path, minima = tmp_path / "minima.html", search.minima_
    columns, names = Page(text).tables[0][0], ("test_loss", "param_C", "reason")
    script = CLICKS.replace("COLUMNS", str([columns.index(name) for name in names]))
    path.write_text(text.replace("</body>", f"<script>{script}</script></body>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(re.search("<pre>(.*)</pre>", done.stdout).group(1))
    assert len(found) == len(names)
    for name, sorted_by_it in zip(names, found, strict=True):
        known = minima[minima[name].notna() & (minima[name] != "")]
        for state, one in zip(("ascending", "descending"), sorted_by_it, strict=True):
            expected = known.sort_values(name, ascending=state == "ascending", kind="stable")
            ranks = expected["rank"].tolist()
            rest = [rank for rank in minima["rank"] if rank not in ranks]
            assert one == {"state": state, "ranks": ranks + rest}, name

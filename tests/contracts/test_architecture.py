"""docs/architecture.md names files and functions that exist, and calls in their real order."""

import ast
import re
import sys
import tomllib
from itertools import permutations
from operator import attrgetter
from pathlib import Path

import pytest
from sklearn.datasets import load_iris
from torch import nn

from relflat_sk import FlatnessScorer
from relflat_sk import RelativeFlatnessRegularizedClassifier as Net
from tests.contracts.pages import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TOKENS = sorted(set(re.findall(r"`([^`]+)`", PAGE)))
PATHS = [token for token in TOKENS if re.fullmatch(r"[\w./]+/[\w.]+|\w+\.(md|toml)", token)]
NAMES = [name for name in TOKENS if re.fullmatch(r"[A-Za-z_][\w.]*", name) and name not in PATHS]
PAIR = re.compile(r"`([\w.]+)`\s+in\s+`([\w./]+\.py)`")
PAIRS = sorted(set(PAIR.findall(PAGE)))
# names of the page's examples, of tools and in formulas
FOREIGN = {"mean_curvature", "data__random_labels", "Conv1D", "deptry", "data__",
           "H", "W", "z", "X", "y", "X_fit", "y_fit", "delta"}  # fmt: skip


def qualified_names(path):
    """Names that a file defines at its top and in its classes, and attributes of these."""
    found = set()

    def visit(body, prefix):
        for node in body:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            found.update(prefix + one.id for one in targets if isinstance(one, ast.Name))
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


@pytest.fixture(scope="module")
def known():
    """Names of the library with what they belong to and alone, of its modules, and foreign ones."""
    names = set(FOREIGN)
    for path in ROOT.glob("relflat_sk/**/*.py"):
        names |= {path.stem, *path.parts, *qualified_names(path)}
    names |= {name.rpartition(".")[2] for name in names}
    return names | {name for name, path in PAIRS if path.startswith("tests/")}


def test_the_page_names_much():
    assert len(PATHS) > 30
    assert len(PAIRS) > 40


@pytest.mark.parametrize("path", PATHS)
def test_paths_exist(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("name", "path"), PAIRS)
def test_names_are_where_the_page_says(name, path):
    assert name in qualified_names(ROOT / path)


@pytest.mark.parametrize("name", NAMES)
def test_names_exist(name, known):
    is_of_torch = name.startswith("nn.") and attrgetter(name.removeprefix("nn."))(nn)
    assert is_of_torch or name in known


def told(section):
    """The functions of a section's numbered list, in order, without dispatchers."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    pairs = PAIR.findall(text[text.index("1. ") :].partition("\n\n")[0])
    return list(dict.fromkeys((ROOT / path, name) for name, path in pairs if name != "to_network"))


def calls(function):
    """Functions of the package in the order of their first calls."""
    found = {}

    def profile(frame, event, _):
        if event == "call":
            found.setdefault((Path(frame.f_code.co_filename), frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return list(found)


@pytest.mark.parametrize(
    ("section", "layer", "normalize", "call"),
    [
        ("From a scorer to a number", "all", False, FlatnessScorer()),
        ("From a fit to written-out gradients", -1, False, Net.partial_fit),
        ("From a training step to autograd", "all", True, Net.partial_fit),
    ],
    ids=["scorer", "fit", "training step"],
)
def test_functions_are_called_in_the_order_of_the_page(section, layer, normalize, call):
    X, y = load_iris(return_X_y=True)
    params = {"flatness_layer": layer, "flatness_normalize": normalize, "max_epochs": 3}
    net = Net(**params, verbose=0, random_state=0).fit(X, y)
    expected = told(section)
    assert len(expected) > 5
    assert [one for one in calls(lambda: call(net, X, y)) if one in expected] == expected


def test_the_picture_has_the_layers_of_the_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = contracts["tool"]["importlinter"]["contracts"][0]["layers"]
    floor = {name: at for at, row in enumerate(layers) for name in row.split(" | ")}
    picture = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    words = re.findall(r'<text [^>]*y="(\d+)"[^>]*>(\w+)</text>', picture)
    height = {name: int(y) for y, name in words if name in floor}
    assert height.keys() == floor.keys()
    for (one, high), (other, low) in permutations(floor.items(), 2):
        # the ground is drawn as one row
        assert high <= low or height[one] >= height[other], (one, other)

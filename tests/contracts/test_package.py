"""Contracts of the package as a whole: public names, documentation, imports."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import relflat_sk

PACKAGE = Path(relflat_sk.__file__).parent
DOORS = ("measures", "training", "theory", "minima", "plots", "search")


def test_importing_the_package_is_free_of_side_effects():
    code = (
        "import sys, torch, numpy as np\n"
        "state = np.random.get_state()[1].copy()\n"
        "before = torch.get_rng_state(), state, torch.get_default_dtype()\n"
        "import relflat_sk\n"
        "assert 'matplotlib' not in sys.modules\n"
        "assert torch.equal(before[0], torch.get_rng_state())\n"
        "assert (before[1] == np.random.get_state()[1]).all()\n"
        "assert before[2] == torch.get_default_dtype()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_lists_what_there_is():
    assert len(set(relflat_sk.__all__)) == len(relflat_sk.__all__)
    for name in relflat_sk.__all__:
        assert hasattr(relflat_sk, name)


def test_doors_lead_to_every_public_name():
    behind = {"FlatnessWarning", "LayerNotFoundError"}
    for door in DOORS:
        module = importlib.import_module(f"relflat_sk.{door}")
        for name in module.__all__:
            assert getattr(relflat_sk, name, getattr(module, name)) is getattr(module, name)
        behind |= set(module.__all__)
    assert set(relflat_sk.__all__) <= behind


def test_only_doors_and_exceptions_have_public_paths():
    paths = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
    modules = {path.parts[:-1] if path.stem == "__init__" else path.parts for path in paths}
    public = {parts for parts in modules if not any(part.startswith("_") for part in parts)}
    assert public == {(), ("exceptions.py",), *((door,) for door in DOORS)}


def test_modules_are_small():
    lengths = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")
    }
    assert not {str(path): length for path, length in lengths.items() if length > 350}


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", relflat_sk.__version__)


def documented(name):
    public = getattr(relflat_sk, name)
    if name.endswith("Display"):  # made by a class method, as in scikit-learn
        public = next(getattr(public, made) for made in dir(public) if made.startswith("from_"))
    return (public.__init__ if inspect.isclass(public) else public), inspect.getdoc(public)


PUBLIC = [
    name
    for name in relflat_sk.__all__
    if callable(getattr(relflat_sk, name))
    and not (
        inspect.isclass(getattr(relflat_sk, name))
        and issubclass(getattr(relflat_sk, name), Exception)
    )
]
# "see there for the parameters": classes that only fix the task
SHORT = {
    "RelativeFlatnessRegularizedClassifier",
    "RelativeFlatnessRegularizedBinaryClassifier",
    "RelativeFlatnessRegularizedRegressor",
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented_with_an_example(name):
    function, doc = documented(name)
    assert doc
    assert "Examples\n--------" in doc
    assert ">>>" in doc
    if name in SHORT:
        return
    section = doc.split("Parameters\n----------")[-1].split("\n\nReturns")[0]
    for parameter, what in inspect.signature(function).parameters.items():
        if parameter in {"self", "args", "kwargs"}:
            continue
        entry = re.search(
            rf"^(?:.*, )?\*{{0,2}}{parameter}(?:,.*)?(?: : .*)?$", section, re.MULTILINE
        )
        assert entry, f"{name} does not document {parameter}"
        stated = re.search(r"default=(.+)$", entry.group())
        if stated and what.default is not inspect.Parameter.empty:
            assert same(stated.group(1), what.default), f"{name}({parameter}={what.default!r})"


def same(told, default):
    try:
        return ast.literal_eval(told) == default
    except ValueError:  # the name of a class
        return inspect.isclass(default) and told.split(".")[-1] == default.__name__

"""Contracts of the package as a whole: public names, imports, versions."""

import importlib
import json
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
import typing
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import relflat_sk
from benchmarks.size import count_parameters
from tests.contracts.pages import ROOT
from tests.processes import run_module

PACKAGE = Path(relflat_sk.__file__).parent
DOORS = ("measures", "training", "fleet", "theory", "minima", "plots", "search")

# the extras in pyproject.toml, optional dependencies of skorch, Optuna and torch; sqlalchemy is
# declared, but slow to import, and needed for some storages only
OPTIONAL = {
    *("accelerate", "curvlinops", "distributed", "h5py", "hypothesis", "importlinter"),
    *("lightning", "matplotlib", "numpydoc", "peft", "PIL", "plotly", "pyhessian", "pytest"),
    *("ray", "safetensors", "sqlalchemy", "transformers"),
}
IN_A_FRESH_INTERPRETER = f"""
import importlib, json, sys
import relflat_sk
assert 'torch' not in sys.modules
import torch, numpy as np
state = np.random.get_state()[1].copy()
before = torch.get_rng_state(), state, torch.get_default_dtype()
assert 'relflat_sk.measures' not in sys.modules
relflat_sk.relative_flatness
assert 'relflat_sk.measures' in sys.modules
doors = ['', *('.' + one for one in {DOORS} + ('exceptions',))]
modules = [importlib.import_module('relflat_sk' + one) for one in doors]
doors = [[sorted(vars(m)), dir(m), m.__all__] for m in modules]
[getattr(relflat_sk, name) for name in relflat_sk.__all__]
assert torch.equal(before[0], torch.get_rng_state())
assert (before[1] == np.random.get_state()[1]).all()
assert before[2] == torch.get_default_dtype()
print(json.dumps([[*sys.modules], doors]))
"""


@pytest.fixture(scope="module")
def fresh():
    """The modules that are imported for all public names, and what the doors hold."""
    command = [sys.executable, "-c", IN_A_FRESH_INTERPRETER]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_packages_are_imported_when_they_are_used_and_without_side_effects(fresh):
    imported = {name.partition(".")[0] for name in fresh[0]}
    assert "relflat_sk" in imported
    assert not imported & OPTIONAL


def test_doors_lead_to_every_public_name():
    behind = {"FlatnessWarning", "LayerNotFoundError"}
    for door in DOORS:
        module = importlib.import_module(f"relflat_sk.{door}")
        for name in module.__all__:
            assert getattr(relflat_sk, name, getattr(module, name)) is getattr(module, name)
        behind |= set(module.__all__)
    assert set(relflat_sk.__all__) <= behind | {"exceptions", *DOORS}


def test_doors_hold_public_names_only(fresh):
    for held, shown, public in fresh[1]:
        assert {name for name in held if not name.startswith("_")} <= set(public)
        assert {name for name in shown if not name.startswith("_")} == set(public)


def test_a_misspelt_name_gets_a_suggestion():
    with pytest.raises(AttributeError, match="'FlatMinimaSearch'"):
        relflat_sk.FlatMinimaSerch  # noqa: B018
    assert not hasattr(relflat_sk, "__wrapped__")


@pytest.mark.parametrize(("name", "n"), [("relative_flatness", 4), ("measure", 2)])
def test_types_tell_what_an_option_returns(name, n):
    overloads = typing.get_overloads(getattr(relflat_sk, name))
    assert len(overloads) == n
    for overload in overloads:
        hints, no = typing.get_type_hints(overload), typing.Literal[False]
        (per_sample,) = typing.get_args(hints.get("per_sample", no))
        (with_stderr,) = typing.get_args(hints.get("return_stderr", no))
        value = NDArray[np.float64] if per_sample else float
        assert hints["return"] == (tuple[value, value] if with_stderr else value)


def test_no_constructor_or_function_has_many_parameters():
    """16; nets three more: `classes`, and the steps that take the penalty."""
    for name, n in count_parameters().drop("relative_flatness").items():
        is_net = name.startswith("RelativeFlatnessRegularized")
        assert n <= (19 if is_net else 16), name


def test_only_doors_and_exceptions_have_public_paths():
    paths = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
    modules = {path.parts[:-1] if path.stem == "__init__" else path.parts for path in paths}
    public = {parts for parts in modules if not any(part.startswith("_") for part in parts)}
    assert public == {(), ("exceptions.py",), *((door,) for door in DOORS)}


def test_no_public_name_hides_a_module():
    for found in pkgutil.walk_packages(relflat_sk.__path__, "relflat_sk."):
        package, _, name = found.name.rpartition(".")
        module = importlib.import_module(found.name)
        assert getattr(importlib.import_module(package), name) is module


@pytest.mark.parametrize("package", ["_engine", "_penalty", "_network", "_models", "fleet"])
def test_what_trains_networks_knows_no_private_names_of_nets(package):
    """A net hands down a `Job`; with the net itself, knowledge would flow up."""
    for path in (PACKAGE / package).glob("*.py"):
        found = re.findall(r"\b\w*net\._[a-z]\w*", path.read_text(encoding="utf-8"))
        assert not found, path.name


def test_the_command_prints_versions():
    run = run_module("relflat_sk")
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0].startswith(f"relflat_sk {relflat_sk.__version__}, Python 3.")
    assert f"torch {version('torch')}" in lines


@pytest.mark.parametrize("file", ["CITATION.cff", "recipe/recipe.yaml"])
def test_files_that_name_the_version_agree(file):
    found = re.search(r"^ *version: (\d\S*)$", (ROOT / file).read_text(), re.MULTILINE)
    assert found[1] == relflat_sk.__version__


def test_the_recipe_has_the_dependencies_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    recipe = (ROOT / "recipe" / "recipe.yaml").read_text(encoding="utf-8")
    needed = {f"python{project['requires-python']}", *project["dependencies"]}
    listed = recipe.partition("  run:\n")[2].partition("\n\n")[0]
    listed = listed.replace("${{ python_min }}", re.search('python_min: "(.*)"', recipe)[1])
    listed = {re.sub("^pytorch", "torch", line) for line in re.findall("- (.*)", listed)}
    assert {line.replace(" ", "") for line in listed} == needed


FORBIDDEN = {
    "Imports go down": ("_losses/table.py", "import relflat_sk.measures"),
    "No circle, in any package": ("_network/layers.py", "import relflat_sk._network.recording"),
    "The mathematics needs torch, numpy and scipy only": ("_penalty/penalty.py", "import skorch"),
    "Optuna is known to the search and the table of minima": ("training/_mlp.py", "import optuna"),
    "search is entered by its door": ("__main__.py", "import relflat_sk.search._search"),
}


def test_linting_fails_on_forbidden_imports(tmp_path):
    pytest.importorskip("importlinter")
    shutil.copytree(PACKAGE, tmp_path / "relflat_sk", ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    def lint():
        command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        verdicts = re.findall(r"^(.*) (KEPT|BROKEN)", run.stdout, re.MULTILINE)
        return run.returncode, {name for name, verdict in verdicts if verdict == "BROKEN"}

    assert lint() == (0, set())
    for file, line in FORBIDDEN.values():
        with (tmp_path / "relflat_sk" / file).open("a", encoding="utf-8") as module:
            module.write(f"{line}\n")
    code, broken = lint()
    assert code == 1
    assert broken >= set(FORBIDDEN)

"""`python -m relflat_sk` prints versions; files that name the version agree."""

import re
import tomllib
from importlib.metadata import version

import pytest

import relflat_sk
from tests.contracts.pages import ROOT
from tests.processes import run_module


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

"""`python -m relflat_sk` describes the installation; files that name the version agree."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version

import pytest

import relflat_sk
from relflat_sk import __main__ as command
from tests.contracts.pages import ROOT
from tests.processes import run_module


def test_the_command_prints_versions_devices_and_extras():
    run = run_module("relflat_sk")
    assert run.returncode == 0, run.stderr
    rows = dict(line.split(": ", 1) for line in run.stdout.splitlines())
    assert rows["relflat_sk"] == relflat_sk.__version__
    assert rows["devices"].startswith("cpu")
    assert f"torch {version('torch')}" in rows["required"]
    assert f"matplotlib {version('matplotlib')}" in rows["extra 'plot'"]


def test_packages_that_are_missing_are_named(monkeypatch):
    lines = ["numpy>=1", "no-such-package>=2; extra == 'more'"]
    monkeypatch.setattr(command, "requires", lambda name: lines)
    assert command._requirements() == {"": ["numpy"], "more": ["no-such-package"]}
    assert "extra 'more': no-such-package (not installed)" in command._describe()


def test_sources_that_are_not_installed_have_a_version(monkeypatch):
    def requires(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(command, "requires", requires)
    lines = command._describe().splitlines()
    assert lines[0] == f"relflat_sk: {relflat_sk.__version__}"
    assert lines[-1] == "required: unknown, because relflat_sk is imported but not installed"


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

"""The size of the library, the paths through it, and the check of other libraries' names."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import paths, size

ROOT = Path(__file__).parents[2]


def test_lines_are_counted_by_what_they_are(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        '"""Two\n\nlines."""\n\n# comment\n'
        "def check(x) -> None:\n    if not x:\n"
        "        raise ValueError(\n            'no'\n        )\n"
        "def f(x) -> int:\n    'One.'\n    warnings.warn('odd')\n    return x\n"
        "def g(x) -> None:\n    x.clear()\n"
    )
    counts = size.weigh(file)
    assert counts == {
        "modules": 1, "lines": 16, "code": 10, "functions": 3, "refusals": 4, "checks": 6,
    }  # fmt: skip


def test_every_package_has_its_row():
    table = size.sizes("relflat_sk")
    assert {"(top)", "measures", "search", "training", "all"} <= set(table.index)
    assert (table.drop(index="all").sum() == table.loc["all"]).all()


def test_a_score_passes_through_files_of_the_library():
    files, functions = paths.passed(paths.calls()["a score"])
    assert all("relflat_sk" in file for file in files)
    assert 10 < len(files) < len(functions)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from optuna.storages import _CachedStorage", "imports optuna.storages._CachedStorage"),
        ("import sklearn.utils._tags", "imports sklearn.utils._tags"),
        ("study._storage", "uses ._storage"),
        ("from unittest import mock", "imports unittest.mock"),
        ("storage.__class__ = dict", "assigns __class__"),
        ("class A:\n    def _own(self):\n        self._own()\n", ""),
    ],
)
def test_private_names_of_other_libraries_fail_and_own_ones_pass(tmp_path, line, found):
    (tmp_path / "module.py").write_text(line)
    run = [sys.executable, ROOT / ".ci" / "private_names.py", tmp_path]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == bool(found)
    assert found in done.stdout

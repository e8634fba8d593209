"""The size of the library, the paths through it, and the check of other libraries' names."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import paths, size

ROOT = Path(__file__).parents[2]


def test_code_is_counted_without_docstrings_comments_and_blank_lines(tmp_path):
    file = tmp_path / "module.py"
    file.write_text('"""Two\n\nlines."""\n\n# comment\ndef f():\n    """One."""\n    return 1\n')
    counts = size.weigh(file)
    assert {name: counts[name] for name in ("lines", "code", "functions")} == {
        "lines": 8, "code": 2, "functions": 1,
    }  # fmt: skip


def test_refusals_are_counted_with_their_messages_and_the_functions_that_only_check(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        "def check(x) -> None:\n    if not x:\n"
        "        raise ValueError(\n            'no'\n        )\n"
        "def f(x) -> int:\n    warnings.warn('odd')\n    return x\n"
        "def g(x) -> None:\n    x.clear()\n"
    )
    counts = size.weigh(file)
    assert (counts["code"], counts["refusals"], counts["checks"]) == (10, 4, 6)


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
        ("sys._getframe()", "uses ._getframe"),
        ("storage.__class__ = dict", "assigns __class__"),
    ],
)
def test_private_names_of_other_libraries_fail(tmp_path, line, found):
    (tmp_path / "module.py").write_text(line)
    run = [sys.executable, ROOT / ".ci" / "private_names.py", tmp_path]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert found in done.stdout


def test_own_private_names_pass(tmp_path):
    (tmp_path / "module.py").write_text("class A:\n    def _own(self):\n        self._own()\n")
    run = [sys.executable, ROOT / ".ci" / "private_names.py", tmp_path]
    assert subprocess.run(run, capture_output=True, check=False).returncode == 0

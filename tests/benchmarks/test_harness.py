"""The parts that benchmarks share, the costs, the script for a GPU, sizes and paths."""

import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path

import pytest

from benchmarks import gpu, paths, size
from benchmarks._harness import timing
from tests.benchmarks.commands import run

ROOT = Path(__file__).parents[2]


def test_every_way_has_its_turn_in_each_round_in_changing_orders(monkeypatch):
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)  # takes long after many tests
    calls = []
    ways = {name: partial(calls.append, name) for name in ("a", "b", "c")}
    times = timing.interleave(ways, rounds=40, warmup=2)
    rounds = [tuple(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert len(rounds) == 42
    assert set(rounds) == set(permutations("abc"))
    lengths = {name: len(seconds) for name, seconds in times.items()}
    assert lengths == dict.fromkeys("abc", 40)


# -- costs ----------------------------------------------------------------------------------------

# a ratio, or a count, that each benchmark prints
RATIOS = [
    ("scoring", "torch.func.hessian / scoring, the measure by itself"),
    ("training", "MLP 784-256-128-10, first layer / no penalty"),
    ("layers", "flatness_report / forward-backward"),
    ("heads", "relative_flatness / forward"),
    ("fitting", "digits, defaults / scikit-learn"),
    ("fleet", "64-128-64-10, batch 32, fleet / torch loop"),
    ("imports", "the first public name / what it imports"),
    ("search", "seconds beside the training of a trial, journal"),
]


def budgets(printed):
    """The last part of what a benchmark prints: values and budgets, by name."""
    return dict(line.split(": ", 1) for line in printed.strip().split("\n\n")[-1].splitlines())


@pytest.mark.scale
@pytest.mark.parametrize(("module", "ratio"), RATIOS, ids=[row[0] for row in RATIOS])
def test_quick_run_prints_ratios_and_budgets(module, ratio):
    printed = run(f"benchmarks.costs.{module}", "--quick", RELFLAT_SK_CIFAR10="")
    assert "torch threads" in printed  # the environment
    value, _, rest = budgets(printed)[ratio].partition(" ")
    assert float(value) > 0
    assert rest.startswith("(budget ")
    assert rest.endswith("not judged (quick)")


@pytest.mark.scale
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("scoring", ["--peak-of", "forward", "--n-samples", "64"]),
        ("heads", ["--quick", "--peak-of", "training step"]),
        ("fleet", ["--n", "2"]),
    ],
    ids=["scoring", "heads", "fleet"],
)
def test_parts_that_quick_runs_leave_out(module, arguments):
    """Each of them runs in a process of its own, and prints a number."""
    assert float(run(f"benchmarks.costs.{module}", *arguments)) > 0


# -- the script for a GPU: parts end in time, and leave what they have printed --------------------

SLEEP = "print('begun', flush=True); __import__('time').sleep(60)"


def test_a_part_that_takes_too_long_is_stopped_and_leaves_what_it_printed(tmp_path):
    end = gpu.run(["timeit", "-n1", "-r1", SLEEP], "cpu", tmp_path / "part.txt", 5)
    assert end.startswith("was stopped")
    assert (tmp_path / "part.txt").read_text().startswith("begun")


@pytest.mark.parametrize("name", gpu.PARTS)
def test_parts_are_modules_that_take_their_arguments(name):
    module, *arguments = gpu.arguments_of(gpu.PARTS[name], "cuda", "images.npz", quick=False)
    assert find_spec(module)
    assert ("--data" in arguments) == gpu.PARTS[name].needs_images
    assert ("cuda" in arguments) == (module != "pytest")


# -- the size of the library, paths through it, and other libraries' private names ----------------


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

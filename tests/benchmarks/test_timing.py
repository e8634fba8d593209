"""Smoke runs of the benchmarks: that they run and print ratios, not how large these are."""

import os
import subprocess
import sys
from functools import partial
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from benchmarks import timing

ROOT = Path(__file__).parents[2]


def run(module, *arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        # several threads only wait for each other where tests run side by side
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "ratios"),
    [
        (
            "benchmarks.scoring",
            [
                "scoring / forward",
                "torch.func.hessian / scoring, the measure by itself",
                "autograd.functional.hessian / scoring, the measure by itself",
                "peak memory, scoring / forward",
            ],
        ),
        (
            "benchmarks.training",
            ["LeNet-5, last layer / no penalty", "MLP, first layer / no penalty"],
        ),
        ("benchmarks.layers", ["flatness_report / forward-backward"]),
    ],
    ids=["scoring", "training", "layers"],
)
def test_quick_run_prints_ratios_and_budgets(module, ratios):
    done = run(module, "--quick", RELFLAT_SK_CIFAR10="")
    assert done.returncode == 0, done.stderr
    assert "torch threads" in done.stdout  # the environment
    *_, budgets = done.stdout.strip().split("\n\n")
    lines = dict(line.split(": ", 1) for line in budgets.splitlines())
    assert set(lines) >= set(ratios)
    for name in ratios:
        value, _, rest = lines[name].partition(" ")
        assert float(value) > 0
        assert rest.startswith("(budget ")
        assert rest.endswith("not judged (quick)")


@pytest.mark.slow
def test_images_come_from_a_file_and_are_decoded_once(tmp_path):
    image = pytest.importorskip("PIL.Image")
    import io

    rng = np.random.default_rng(0)
    files, classes = [], np.arange(6, dtype=np.uint8)
    for _ in classes:
        file = io.BytesIO()
        pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        image.fromarray(pixels).save(file, "JPEG")
        files.append(np.frombuffer(file.getvalue(), dtype=np.uint8))
    np.savez(
        tmp_path / "cifar.npz",
        jpeg=np.concatenate(files),
        offsets=np.cumsum([0, *map(len, files)]),
        y=classes,
        is_train=np.array([True, True, False, True, True, True]),
    )
    code = (
        "import sys; from benchmarks.data import load_images\n"
        "X, y = load_images(4, sys.argv[1])\n"
        "print(tuple(X.shape), y.tolist(), round(abs(X.mean().item()), 3))"
    )
    for _ in range(2):  # the second time from the cache
        done = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "cifar.npz")],
            cwd=ROOT,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == "(4, 3, 32, 32) [0, 1, 3, 4] 0.0"
    assert len(list((tmp_path / "cache" / "relflat_sk").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("benchmarks.reparameterization", "relative_flatness "),
        ("benchmarks.synthetic", "relative flatness orders the gaps"),
    ],
    ids=["reparameterization", "synthetic"],
)
def test_quick_runs_of_the_theory_print_and_draw(module, line, tmp_path):
    pytest.importorskip("matplotlib")
    done = run(module, "--quick", "--figure", str(tmp_path / "figure.png"))
    assert done.returncode == 0, done.stderr
    assert line in done.stdout
    assert "not judged (quick)" in done.stdout
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("turn", [1, 4])
def test_every_way_has_its_turn_in_each_round_in_changing_orders(turn):
    calls = []
    ways = {name: partial(calls.append, name) for name in ("a", "b", "c")}
    times = timing.interleave(ways, rounds=40, warmup=2, turn=turn)
    turns = [calls[i : i + turn] for i in range(0, len(calls), turn)]
    assert all(len(set(one)) == 1 for one in turns)
    rounds = [tuple(one[0] for one in turns[i : i + 3]) for i in range(0, len(turns), 3)]
    assert len(rounds) == 42
    assert set(rounds) == set(permutations("abc"))
    lengths = {name: len(seconds) for name, seconds in times.items()}
    assert lengths == dict.fromkeys("abc", 40 * turn)

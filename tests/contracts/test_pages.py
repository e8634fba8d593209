"""The examples of the README and the docs run as a user would paste them."""

import os
import re
import subprocess
import sys
from textwrap import indent

import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn

from relflat_sk import register_measure, relative_flatness
from tests.contracts.pages import ROOT, assert_prints, blocks, run_block


def test_the_readme_fits_on_a_screen_and_its_example_prints_what_it_says(tmp_path, capsys):
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 80
    run_block("\n".join(blocks("README.md")), tmp_path)
    assert_prints("README.md", capsys.readouterr().out)


def test_the_site_starts_with_the_first_block_of_the_readme():
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert blocks("docs/index.md") == blocks("README.md")[:1]
    assert (
        re.search("```text\n.*\n```", (ROOT / "README.md").read_text(encoding="utf-8"))[0] in text
    )


def test_the_five_minutes_print_what_the_page_says(tmp_path, capsys):
    found = run_block("\n".join(blocks("docs/start.md")), tmp_path)
    assert_prints("docs/start.md", capsys.readouterr().out)
    assert found["net"].score(found["X"] / 16, found["y"]) > 0.95
    assert found["search"].minima_["rank"].tolist() == [1, 2, 3, 4]


def test_the_first_example_of_a_search_runs(tmp_path, capsys):
    run_block(blocks("docs/searching.md")[0], tmp_path)
    assert "relative_flatness" in capsys.readouterr().out


def test_the_example_of_scores_runs(tmp_path, capsys):
    (block,) = blocks("docs/scoring.md")
    run_block(block, tmp_path)
    assert "flatness_weight" in capsys.readouterr().out


@pytest.mark.scale
def test_the_example_of_judging_runs(tmp_path, monkeypatch, capsys):
    (block,) = blocks("docs/judging.md")
    monkeypatch.chdir(tmp_path)
    run_block(block, tmp_path)
    printed = capsys.readouterr().out
    for expected in ("kendall_low", "psi_batch_size", "psi_lr", "cmi_given_2", "chance"):
        assert expected in printed
    assert (tmp_path / "measures.png").stat().st_size > 0
    plt.close("all")


@pytest.fixture
def registered():
    yield "largest weight"
    register_measure("largest weight", None)


def test_measures_of_your_own(registered, tmp_path, capsys):
    (block,) = blocks("docs/measures.md")
    found = run_block(block, tmp_path)
    printed = capsys.readouterr().out
    assert 0 < float(printed.splitlines()[0]) < found["search"].minima_["largest_weight"].max()
    assert registered in printed
    assert found["search"].minima_["largest_weight"].is_monotonic_increasing


@pytest.mark.parametrize(
    "block",
    blocks("docs/training.md"),
    ids=["penalty", "regression", "fleet", "torch", "sam"],
)
def test_examples_of_training_run(block, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # trainers make folders for their output
    run_block(block, tmp_path)
    assert float(capsys.readouterr().out.split()[-1]) > 0.9


# scaling

ON_DISK, DISTRIBUTED, ON_DASK, ON_RAY = blocks("docs/scaling.md")


def run_as_script(block, folder, *options):
    """Run a block in an interpreter of its own, since it starts processes; return its lines."""
    script = folder / "block.py"
    script.write_text(block, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *options, str(script)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def assert_ranks_all(lines):
    """A table of all minima is printed."""
    assert lines[0].split() == ["param_batch_size", "relative_flatness", "rank"]
    rows = [line.split() for line in lines[1:]]
    assert sorted(int(row[1]) for row in rows) == [16, 32, 64, 128]
    assert all(float(row[2]) > 0 for row in rows)


def test_the_example_of_data_on_disk_runs(tmp_path, capsys):
    run_block(ON_DISK, tmp_path)
    score, flatness, again, minus = map(float, capsys.readouterr().out.split())
    assert score > 0.7
    assert flatness == again == -minus


@pytest.mark.scale
def test_the_example_of_several_devices_runs(tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = [float(line) for line in run_as_script(DISTRIBUTED, tmp_path, *torchrun)]
    torch.manual_seed(0)
    X, model = torch.randn(1000, 20), nn.Sequential(nn.Linear(20, 3))
    y = X[:, :3].argmax(dim=1)
    expected = relative_flatness(model, X, y, criterion=nn.CrossEntropyLoss())
    assert found == pytest.approx([expected, expected], rel=1e-6)


@pytest.mark.scale
@pytest.mark.parametrize("cluster", ["dask", "ray"])
def test_the_examples_of_clusters_run(cluster, tmp_path):
    needed = {"dask": "distributed", "ray": "ray"}[cluster]
    pytest.importorskip(needed, reason=f"needs the extra {cluster}")
    script = ON_DASK
    if cluster == "ray":  # in place of the cluster of dask
        search, _, rest = ON_DASK.partition("    with LocalCluster")
        script = search + indent(ON_RAY, "    ") + rest[rest.index("    print(") :]
    assert_ranks_all(run_as_script(script, tmp_path)[-5:])

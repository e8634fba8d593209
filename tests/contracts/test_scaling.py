"""The examples of docs/scaling.md run as a user would paste them."""

import os
import subprocess
import sys
from textwrap import indent

import pytest
import torch
from torch import nn

from relflat_sk import relative_flatness
from tests.contracts.pages import ROOT, blocks, run_block

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
def test_the_example_of_dask_runs(tmp_path):
    pytest.importorskip("distributed", reason="needs the extra dask")
    assert_ranks_all(run_as_script(ON_DASK, tmp_path))


@pytest.mark.scale
def test_the_example_of_ray_runs(tmp_path):
    """In place of the cluster of dask."""
    pytest.importorskip("ray", reason="needs the extra ray")
    search, _, rest = ON_DASK.partition("    with LocalCluster")
    shown = rest[rest.index("    print(") :]
    lines = run_as_script(search + indent(ON_RAY, "    ") + shown, tmp_path)
    assert_ranks_all(lines[-5:])

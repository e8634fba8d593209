"""The examples run as a user would paste or call them: of the README, the docs and the gallery."""

import copy
import os
import re
import runpy
import subprocess
import sys
from textwrap import dedent, indent

import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn

from relflat_sk import rank_models, relative_flatness
from tests.contracts.pages import ROOT, assert_prints, blocks, run_block
from tests.processes import run_script

# pages whose blocks print what the page says, and the blocks that are run as one script
PRINTED = {
    "README.md": slice(None),
    "docs/start.md": slice(None),
    "docs/scoring.md": slice(1),
    "docs/measures.md": slice(None),
    "docs/saving.md": slice(None),
}


@pytest.mark.parametrize("page", PRINTED)
def test_examples_print_what_the_page_says(page, tmp_path, capsys, monkeypatch):
    script = "\n".join(blocks(page)[PRINTED[page]])
    monkeypatch.chdir(tmp_path)
    found = run_block(script, tmp_path)
    assert_prints(page, capsys.readouterr().out)
    if page == "docs/start.md":
        assert found["net"].score(found["X"] / 16, found["y"]) > 0.95
        assert found["search"].minima_["rank"].tolist() == [1, 2, 3, 4]
    if page == "docs/measures.md":
        assert found["search"].minima_["largest_weight"].is_monotonic_increasing


def test_the_readme_fits_on_a_screen_and_begins_the_site():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) < 80
    assert "{include} ../README.md" in index
    shown, end, _ = readme.partition(re.search(':end-before: "(.*)"', index)[1])
    assert end
    assert shown.count("```") == 4  # the first block, and what it prints


SCORED = {"searching": blocks("docs/searching.md")[0]}  # the last number printed is a score
NAMES = ("penalty", "regression", "fleet", "torch")
SCORED |= zip(NAMES, blocks("docs/training.md"), strict=True)


@pytest.mark.parametrize("name", SCORED)
def test_examples_reach_a_score(name, tmp_path, capsys):
    run_block(SCORED[name], tmp_path)
    assert float(capsys.readouterr().out.split()[-1]) > 0.9


def test_the_recipe_of_a_shared_study_runs_again_and_again(tmp_path, capsys, monkeypatch):
    """As on several machines; what one of them enqueued is trained in each."""
    monkeypatch.chdir(tmp_path)
    (code,) = (one for one in blocks("docs/searching.md") if "shared.db" in one)
    for n_trials in (4, 8):
        found = run_block(code, tmp_path)
        assert len(found["study"].trials) == n_trials
    assert [trial.params["batch_size"] for trial in found["study"].trials[::4]] == [16, 16]
    assert "module__hidden_layer_sizes" in capsys.readouterr().out


def test_the_example_of_checkpoints_runs(tmp_path, capsys):
    found = run_block(blocks("docs/searching.md")[-2], tmp_path)
    printed = capsys.readouterr()
    assert "3/3" in printed.err
    assert "step 300" in printed.out
    assert found["table"]["comparable"].all()


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    """The functions that the page offers for other checkpoints."""
    return run_block(blocks("docs/searching.md")[-1], tmp_path_factory.mktemp("page"))


X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
OF_TASK = {"X": X, "y": X[:, :3].argmax(dim=1), "criterion": nn.CrossEntropyLoss()}


def assert_ranks(models, nets, **arguments):
    """Compare a table of checkpoints with the flatness of each network."""
    table = rank_models(models, **arguments, **OF_TASK, measure="relative_flatness")
    table = table.sort_values("trial")
    expected = [relative_flatness(net, **OF_TASK) for net in nets]
    assert table["relative_flatness"].tolist() == pytest.approx(expected, rel=1e-5)


def build():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.fixture
def nets():
    torch.manual_seed(0)
    return [build() for _ in range(3)]


NO_MINIMA = pytest.mark.filterwarnings("ignore:.*models are no minima:relflat_sk.FlatnessWarning")


@NO_MINIMA
def test_the_page_reads_an_entry_of_a_checkpoint_and_shards(readers, nets, tmp_path):
    files, folders = [], []
    for i, net in enumerate(nets):
        files.append(tmp_path / f"{i}.ckpt")
        folders.append(tmp_path / f"{i}")
        folders[i].mkdir()
        weights = net.state_dict()
        named = {f"model.{name}": value for name, value in weights.items()}
        torch.save({"state_dict": named, "hyper_parameters": {"folder": tmp_path}}, files[i])
        for name, value in weights.items():
            torch.save({name: value}, folders[i] / f"part-{name}.bin")
    assert_ranks(files, nets, module=build(), load=readers["read_entry"])
    assert_ranks(folders, nets, module=build(), load=readers["read_shards"])


@NO_MINIMA
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft calls it
def test_a_generator_puts_adapters_on_a_base(nets, tmp_path):
    peft = pytest.importorskip("peft")
    base, merged, folders = nets[0], [], []
    before = copy.deepcopy(base.state_dict())
    for i in range(2):
        config = peft.LoraConfig(target_modules=["0", "2"], r=2, init_lora_weights=False)
        adapted = peft.get_peft_model(copy.deepcopy(base), config)
        folders.append(tmp_path / str(i))
        adapted.save_pretrained(folders[-1])
        merged.append(adapted.merge_and_unload())
    load = peft.PeftModel.from_pretrained
    models = ((folder, load(copy.deepcopy(base), folder)) for folder in folders)
    assert_ranks(models, merged)
    torch.testing.assert_close(base.state_dict(), before, rtol=0, atol=0)


@pytest.mark.scale
def test_the_example_of_judging_runs(tmp_path, monkeypatch, capsys):
    (block,) = blocks("docs/judging.md")
    monkeypatch.chdir(tmp_path)
    run_block(block, tmp_path)
    printed = capsys.readouterr().out
    for expected in ("kendall_low", "psi_batch_size", "psi_lr", "cmi_high", "chance"):
        assert expected in printed
    assert (tmp_path / "measures.png").stat().st_size > 0
    plt.close("all")


TRAINERS = dict(zip(("lightning", "transformers"), blocks("docs/trainers.md"), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("library", TRAINERS)
@pytest.mark.filterwarnings("ignore:::lightning")
def test_the_penalty_flattens_in_other_libraries_trainers(library, tmp_path, capsys, monkeypatch):
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)  # trainers make folders for their output
    flatness = []
    for weight in ("1.0", "0.0"):
        run_block(TRAINERS[library].replace("weight=1.0", f"weight={weight}"), tmp_path)
        *_, found, accuracy = capsys.readouterr().out.split()
        assert float(accuracy) > 0.9
        flatness.append(float(found))
    assert flatness[0] < 0.6 * flatness[1]


# scaling

ON_DISK, ON_DASK, ON_RAY = blocks("docs/scaling.md")
DISTRIBUTED = """
import torch
import torch.distributed as dist
from relflat_sk import relative_flatness

dist.init_process_group("gloo")
torch.manual_seed(0)
X, net = torch.randn(1000, 20), torch.nn.Sequential(torch.nn.Linear(20, 3))
y = X[:, :3].argmax(dim=1)
criterion, model = torch.nn.CrossEntropyLoss(), torch.nn.parallel.DistributedDataParallel(net)
"""


def run_as_script(block, folder, *options):
    """Run a block in an interpreter of its own, since it starts processes; return its lines."""
    script = folder / "block.py"
    script.write_text(block, encoding="utf-8")
    command = [sys.executable, "-W", "ignore", *options, str(script)]
    settings = {"cwd": folder, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "timeout": 900}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **settings)
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
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    measured = dedent(re.search(r"^    if dist.get_rank.*(\n    .*)*", page, re.MULTILINE)[0])
    script = f"{DISTRIBUTED}{measured}\ndist.destroy_process_group()\n"
    (line,) = run_as_script(script, tmp_path, *torchrun)  # of the process of rank 0
    mean, stderr = map(float, line.split())
    torch.manual_seed(0)
    X, model = torch.randn(1000, 20), nn.Sequential(nn.Linear(20, 3))
    y = X[:, :3].argmax(dim=1)
    sample = relative_flatness(model, X[:300], y[:300], criterion=nn.CrossEntropyLoss())
    assert mean == pytest.approx(sample, rel=1e-6)
    whole = relative_flatness(model, X, y, criterion=nn.CrossEntropyLoss())
    assert abs(mean - whole) < 3 * stderr < 0.5 * whole


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


# -- examples/, the demo in its small version -----------------------------------------------------

GALLERY = sorted((ROOT / "examples" / "gallery").glob("plot_*.py"))
# most of the gallery's time; the nightly builds run all, as `make docs` does
LONG = {
    *("plot_adapters", "plot_batch_sizes", "plot_displays", "plot_ensemble", "plot_fine_tuning"),
    *("plot_label_noise", "plot_layers", "plot_limit", "plot_rank_classifiers"),
    *("plot_robustness", "plot_study", "plot_torch_loop"),
}


# of peft, beside a newer version of transformers
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.* models are no minima:relflat_sk.FlatnessWarning")
@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [pytest.param(one, marks=[pytest.mark.scale] * (one.stem in LONG)) for one in GALLERY],
    ids=lambda path: path.stem,
)
def test_what_an_example_of_the_gallery_asserts_is_true(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(script)])  # those of pytest are paths of pictures to it
    if script.stem == "plot_adapters":
        pytest.importorskip("peft")
    with plt.rc_context():  # Optuna's plots set a style
        runpy.run_path(str(script), run_name="__main__")
    assert plt.get_fignums()
    plt.close("all")


@pytest.mark.slow
def test_the_demo_prints_its_findings_and_draws_them(tmp_path):
    picture = tmp_path / "folder" / "minima.png"
    script = ROOT / "examples" / "rank_minima.py"
    run = run_script(script, "--quick", "--output", picture, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    for expected in (
        "4 candidates on 600 digits, 1197 held out",
        "Minima, flattest first:",
        "kendall_low",
        "5-fold cross-validation",
        "best candidate (hindsight)",
    ):
        assert expected in run.stdout
    assert max(map(len, run.stdout.splitlines()[:-1])) <= 100  # the last one has the path
    assert "minima: 100%" in run.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_the_example_of_sharp_samples_prints_areas():
    script = ROOT / "examples" / "sharp_samples.py"
    run = run_script(script, "--epochs", "3", "6")
    assert run.returncode == 0, run.stderr
    first, *_, header, fitted, loss, _margin, _first, last, _normalized = run.stdout.splitlines()
    assert first == "900 digits, 45 of them with a wrong label"
    assert header.split() == ["3", "epochs", "6", "epochs"]
    assert float(fitted.split()[-1]) < 0.2  # so early, no wrong label is fitted yet
    # then the loss knows the wrong labels, and the flatness, which has no labels in it, does not
    assert float(loss.split()[-1]) > 0.95
    assert last.startswith("flatness, last layer")
    assert 0.4 < float(last.split()[-1]) < 0.85

"""The examples as a user runs them, the demo in its small version."""

import runpy
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from tests.processes import run_script

ROOT = Path(__file__).parents[2]
GALLERY = sorted((ROOT / "examples" / "gallery").glob("plot_*.py"))
# most of the gallery's time; the nightly builds run all, as `make docs` does
LONG = {
    *("plot_adapters", "plot_displays", "plot_fine_tuning", "plot_label_noise", "plot_layers"),
    *("plot_lightning", "plot_limit", "plot_rank_classifiers", "plot_robustness", "plot_study"),
    *("plot_torch_loop", "plot_trainer"),
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
def test_what_an_example_of_the_gallery_asserts_is_true(script):
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
        "relative_flatness",
        "kendall_low",
        "5-fold cross-validation",
        "average candidate",
        "best candidate (hindsight)",
        "Kendall tau",
    ):
        assert expected in run.stdout
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

"""Contracts of the package as a whole: public names, documentation, imports."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import relflat_sk

PACKAGE = Path(relflat_sk.__file__).parent
MODULES = {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.glob("*.py")}

CORE = {
    "exceptions",
    "estimates",
    "numerics",
    "random_states",
    "norms",
    "folding",
    "margin",
    "paths",
    "operator_norm",
    "sharpness",
    "perturbation",
    "worst_case",
    "pac_bayes",
    "fisher_rao",
    "curvature",
    "loss_table",
    "losses",
    "layers",
    "layer_maps",
    "attention",
    "views",
    "quantities",
    "summation",
    "spectrum",
    "batches",
    "network",
    "feature_moves",
    "flatness",
    "penalty",
    "directions",
    "norm_layers",
    "batch_flatness",
    "models",
    "homogeneity",
    "scale_rules",
    "reparameterize",
}
FACE = {
    "conditions",
    "_sklearn_losses",
    "_sklearn_models",
    "_estimator_net",
    "_estimators",
    "_inputs",
    "_randomness",
    "_sample_weights",
    "_tasks",
    "_training",
    "invariances",
    "measures",
    "neighbours",
    "representativeness",
    "robustness",
    "scorer",
    "nets",
    "sam",
    "callbacks",
    "selection",
}
STUDY = {"minima", "objective", "space", "study", "sweep", "correlation"} | {
    "candidates",
    "claims",
    "fitting",
    "html_report",
    "labels",
    "remeasure",
    "results",
    "scaling",
    "storages",
    "weights",
    "resampling",
    "axes",
    "granulated",
    "mutual_information",
    "drawing",
    "clouds",
    "minima_plots",
    "measure_plots",
    "label_noise_plots",
    "model_plots",
    "training_plots",
}


def imported(tree):
    """Top-level names imported anywhere in a module, functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_every_module_has_its_place():
    assert CORE | FACE | STUDY | {"__init__"} == MODULES.keys()


@pytest.mark.parametrize("name", sorted(CORE | FACE))
def test_imports_point_one_way(name):
    above = FACE | STUDY if name in CORE else STUDY
    barred = {f"relflat_sk.{other}" for other in above}
    found = set(imported(MODULES[name]))
    assert not found & barred
    if name in CORE:
        assert not {module.split(".")[0] for module in found} & {"sklearn", "skorch", "optuna"}
    else:
        assert not {module.split(".")[0] for module in found} & {"optuna"}


def test_importing_the_package_is_free_of_side_effects():
    code = (
        "import sys, torch, numpy as np\n"
        "state = np.random.get_state()[1].copy()\n"
        "before = torch.get_rng_state(), state, torch.get_default_dtype()\n"
        "import relflat_sk\n"
        "assert 'matplotlib' not in sys.modules\n"
        "assert torch.equal(before[0], torch.get_rng_state())\n"
        "assert (before[1] == np.random.get_state()[1]).all()\n"
        "assert before[2] == torch.get_default_dtype()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_lists_what_there_is():
    assert len(set(relflat_sk.__all__)) == len(relflat_sk.__all__)
    for name in relflat_sk.__all__:
        assert hasattr(relflat_sk, name)


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", relflat_sk.__version__)


def documented(name):
    public = getattr(relflat_sk, name)
    if name.endswith("Display"):  # made by a class method, as in scikit-learn
        public = next(getattr(public, made) for made in dir(public) if made.startswith("from_"))
    return (public.__init__ if inspect.isclass(public) else public), inspect.getdoc(public)


PUBLIC = [
    name
    for name in relflat_sk.__all__
    if callable(getattr(relflat_sk, name))
    and not (
        inspect.isclass(getattr(relflat_sk, name))
        and issubclass(getattr(relflat_sk, name), Exception)
    )
]
# "see there for the parameters": classes that only fix the task
SHORT = {
    "RelativeFlatnessRegularizedClassifier",
    "RelativeFlatnessRegularizedBinaryClassifier",
    "RelativeFlatnessRegularizedRegressor",
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented_with_an_example(name):
    function, doc = documented(name)
    assert doc
    assert "Examples\n--------" in doc
    assert ">>>" in doc
    if name in SHORT:
        return
    section = doc.split("Parameters\n----------")[-1].split("\n\nReturns")[0]
    for parameter, what in inspect.signature(function).parameters.items():
        if parameter in {"self", "args", "kwargs"}:
            continue
        entry = re.search(
            rf"^(?:.*, )?\*{{0,2}}{parameter}(?:,.*)?(?: : .*)?$", section, re.MULTILINE
        )
        assert entry, f"{name} does not document {parameter}"
        stated = re.search(r"default=(.+)$", entry.group())
        if stated and what.default is not inspect.Parameter.empty:
            assert same(stated.group(1), what.default), f"{name}({parameter}={what.default!r})"


def same(told, default):
    try:
        return ast.literal_eval(told) == default
    except ValueError:  # the name of a class
        return inspect.isclass(default) and told.split(".")[-1] == default.__name__

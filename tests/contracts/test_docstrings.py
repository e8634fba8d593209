"""Docstrings: numpydoc for public names and extension points, a sentence elsewhere."""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from operator import attrgetter

import pytest
from numpydoc.validate import validate

import relflat_sk

MODULES = sorted(
    name
    for _, name, _ in pkgutil.walk_packages(relflat_sk.__path__, "relflat_sk.")
    if not hasattr(importlib.import_module(name), "__path__")
)
# see numpydoc.validate.ERROR_MSGS: no docstring; summary; parameters; returns; yields; layout
CODES = {
    *("GL03", "GL06", "GL07", "GL08", "SS01", "SS02", "SS03", "SS04", "SS05", "SS06"),
    *("PR01", "PR02", "PR03", "PR04", "PR05", "PR06", "PR07", "RT01", "RT03", "YD01"),
}
DOORS = ("measures", "training", "fleet", "theory", "minima", "plots", "search")
PUBLIC = {
    f"{value.__module__}.{name}": value
    for door in DOORS
    for name, value in vars(importlib.import_module(f"relflat_sk.{door}")).items()
    if name in importlib.import_module(f"relflat_sk.{door}").__all__
}
# what docs/architecture.md tells others to write
EXTENSION_POINTS = [
    "relflat_sk._network.layers.LayerMap",
    "relflat_sk._losses.curvature.ClosedForm",
    "relflat_sk._losses.curvature.Diagonal",
    "relflat_sk._losses.curvature.Softmax",
]


def documented():
    """Paths of public functions, classes and their own public methods."""
    for path, value in PUBLIC.items():
        yield path
        for name, member in vars(value).items() if inspect.isclass(value) else ():
            function = getattr(member, "__func__", member)
            inherited = any(hasattr(base, name) for base in value.__mro__[1:])
            if inspect.isfunction(function) and not name.startswith("_") and not inherited:
                yield f"{path}.{name}"


@pytest.mark.parametrize("path", [*sorted(documented()), *EXTENSION_POINTS])
def test_docstrings_are_complete(path):
    wrong = [f"{code} {text}" for code, text in validate(path)["errors"] if code in CODES]
    assert not wrong, "\n".join(wrong)


def resolve(path):
    module = max((name for name in MODULES if path.startswith(f"{name}.")), key=len)
    return attrgetter(path.removeprefix(f"{module}."))(importlib.import_module(module))


NAMES = [name for name in relflat_sk.__all__ if not inspect.ismodule(getattr(relflat_sk, name))]


@pytest.mark.parametrize("name", NAMES)
def test_public_names_have_an_example_and_lead_to_related_ones(name):
    public = getattr(relflat_sk, name)
    if inspect.isclass(public) and issubclass(public, Exception):
        return
    assert "See Also\n--------\n" in inspect.getdoc(public)
    if name.endswith("Display"):  # made by a class method, as in scikit-learn
        public = next(getattr(public, made) for made in dir(public) if made.startswith("from_"))
    assert "Examples\n--------\n" in inspect.getdoc(public)


@pytest.mark.parametrize("task", ["BinaryClassifier", "Classifier", "Net", "Regressor"])
def test_nets_document_parameters_attributes_and_history(task):
    net = getattr(relflat_sk, f"RelativeFlatnessRegularized{task}")
    doc = inspect.getdoc(net)
    entries = re.findall(r"^(\w+) : ", doc, re.MULTILINE)
    parameters = {*inspect.signature(net).parameters} - {"skorch_arguments"}
    assert parameters | {"relative_flatness_", "history", "module_", "converged_"} <= {*entries}
    assert len(entries) == len({*entries})
    assert ("classes_" in entries) == (task != "Regressor")
    for column in ("train_loss", "valid_loss", "flatness_penalty", "flatness_clipped"):
        assert f"`{column}`" in doc
    assert "as there" not in doc


def test_the_help_of_the_package_names_ten_by_task():
    named = re.findall(r"`(\w+)`", relflat_sk.__doc__)
    assert len(named) == len({*named}) == 10
    assert {*named} <= {*relflat_sk.__all__}


@pytest.mark.parametrize("path", sorted(documented()))
def test_stated_defaults_are_true(path):
    found = resolve(path)
    parameters = inspect.signature(found).parameters
    stated = re.findall(r"^(\w+(?:, \w+)*) : .*default=(.+)$", inspect.getdoc(found), re.MULTILINE)
    for name in [name for names, _ in stated for name in names.split(", ")]:
        told = next(told for names, told in stated if name in names.split(", "))
        default = parameters[name].default
        known = told.split(".")[-1] == getattr(default, "__name__", None)  # of a class
        assert known or ast.literal_eval(told) == default, name


# "weights : Tensor", also with "or None", "optional" or "default=..."
SHAPELESS = re.compile(
    r"^(?:\w+(?:, \w+)* : )?(?:Tensor|ndarray)(?: or None)?(?:, (?:optional|default=.*))?$"
)


@pytest.mark.parametrize("path", [*sorted(documented()), *EXTENSION_POINTS])
def test_arrays_have_a_shape(path):
    """An entry says ``Tensor of shape (n, m)``, or ``Tensor of any shape``."""
    doc = inspect.getdoc(resolve(path)) or ""
    assert not [line for line in doc.splitlines() if SHAPELESS.match(line)]


def raises_section(value):
    """Names of the exceptions that a docstring documents."""
    section = (inspect.getdoc(value) or "").partition("Raises\n------\n")[2]
    section = re.split(r"\n\n\w[\w ]*\n-{3,}\n", section)[0]
    return {
        name for line in re.findall(r"^\w.*$", section, re.MULTILINE) for name in line.split(", ")
    }


def raised(function):
    """Names of the exceptions that a function raises itself, or of functions that make them."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield ast.unparse(node.exc.func).split(".")[-1]


def is_documented(what, section):
    """A call such as ``raise refusal(node)`` may make any of the documented exceptions."""
    return what in section or (bool(section) and what.lstrip("_")[0].islower())


@pytest.mark.parametrize("path", sorted(PUBLIC))
def test_raised_exceptions_are_documented(path):
    value = PUBLIC[path]
    made_by = "__post_init__" if hasattr(value, "__dataclass_fields__") else "__init__"
    function = inspect.unwrap(value) if inspect.isfunction(value) else vars(value).get(made_by)
    if function is None:
        return
    section = raises_section(value)
    assert not [what for what in raised(function) if not is_documented(what, section)]


@pytest.mark.parametrize("name", MODULES)
def test_modules_say_what_they_do(name):
    summary, _, rest = importlib.import_module(name).__doc__.partition("\n")
    assert summary.endswith((".", ":")), summary
    assert not rest or rest.startswith("\n"), summary

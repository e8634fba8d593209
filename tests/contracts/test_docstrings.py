"""Contract of the docstrings: numpydoc's own validation, and what it does not check."""

import ast
import importlib
import inspect
import pkgutil
import re
from operator import attrgetter

import pytest
from numpydoc.validate import validate

import relflat_sk

MODULES = sorted(
    name
    for _, name, _ in pkgutil.walk_packages(relflat_sk.__path__, "relflat_sk.")
    if not hasattr(importlib.import_module(name), "__path__")
)
# see numpydoc.validate.ERROR_MSGS: no docstring; summary; parameters; returns; yields
EVERYWHERE = {
    "GL08",
    "SS01",
    "SS03",
    "SS06",
    "PR01",
    "PR02",
    "PR03",
    "PR04",
    "PR07",
    "RT01",
    "RT03",
    "YD01",
}
AT_THE_DOORS = EVERYWHERE | {"GL03", "GL06", "GL07", "SS02", "SS04", "SS05", "PR05", "PR06"}
DOORS = [
    importlib.import_module(f"relflat_sk.{door}").__all__
    for door in ("measures", "training", "theory", "minima", "plots", "search")
]
PUBLIC = {name for names in DOORS for name in names}


def own(module, kind):
    """Functions or classes that a module defines by a statement of its own; no lambdas."""
    return [
        value
        for name, value in vars(module).items()
        if kind(value) and (value.__module__, value.__qualname__) == (module.__name__, name)
    ]


def documented(module):
    """Names of what needs a docstring: no underscore, and no docstring at a base class."""
    for function in own(module, inspect.isfunction):
        if not function.__name__.startswith("_"):
            yield function.__name__
    for cls in own(module, inspect.isclass):
        if cls.__name__.startswith("_"):
            continue
        yield cls.__name__
        for name, member in vars(cls).items():
            function = getattr(member, "__func__", member)
            inherited = any(hasattr(base, name) for base in cls.__mro__[1:])
            defined = inspect.isfunction(function) and function.__name__ == name
            if defined and not name.startswith("_") and not inherited:
                yield f"{cls.__name__}.{name}"


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_are_complete(name):
    module = importlib.import_module(name)
    wrong = []
    for path in documented(module):
        codes = AT_THE_DOORS if path.split(".")[0] in PUBLIC else EVERYWHERE
        found = validate(f"{name}.{path}")["errors"]
        wrong += [f"{path}: {code} {text}" for code, text in found if code in codes]
    assert not wrong, "\n".join(wrong)


# "weights : Tensor", also with "or None", "optional" or "default=..."
SHAPELESS = re.compile(
    r"^(?:\w+(?:, \w+)* : )?(?:Tensor|ndarray)(?: or None)?(?:, (?:optional|default=.*))?$"
)


@pytest.mark.parametrize("name", MODULES)
def test_arrays_have_a_shape(name):
    """An entry says ``Tensor of shape (n, m)``, or ``Tensor of any shape``."""
    module = importlib.import_module(name)
    wrong = []
    for path in documented(module):
        doc = inspect.getdoc(attrgetter(path)(module)) or ""
        wrong += [f"{path}: {line}" for line in doc.splitlines() if SHAPELESS.match(line)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", MODULES)
def test_references_do_not_begin_with_an_initial(name):
    """The site would show the H of "H. Petzka" as the number of a list."""
    source = inspect.getsource(importlib.import_module(name))
    assert not re.findall(r"\.\. \[\d\] \w\. .*", source)


def raises_section(node):
    """Names of the exceptions that a docstring documents."""
    section = (ast.get_docstring(node) or "").partition("Raises\n------\n")[2]
    section = re.split(r"\n\n\w[\w ]*\n-{3,}\n", section)[0]
    return {
        name for line in re.findall(r"^\w.*$", section, re.MULTILINE) for name in line.split(", ")
    }


def raised(function):
    """Names of the exceptions that a function raises itself, or of functions that make them."""
    for node in ast.walk(function):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield ast.unparse(node.exc.func).split(".")[-1]


def raising(tree):
    """Functions that raise, each with the docstring that must say so: their own or the class's."""
    for cls in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
        for node in cls.body:
            if isinstance(node, ast.FunctionDef) and node.name in {"__init__", "__post_init__"}:
                yield node, cls
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node, node


def is_documented(what, section):
    """A call such as ``raise refusal(node)`` may make any of the documented exceptions."""
    return what in section or (bool(section) and what.lstrip("_")[0].islower())


@pytest.mark.parametrize("name", MODULES)
def test_raised_exceptions_are_documented(name):
    tree = ast.parse(inspect.getsource(importlib.import_module(name)))
    wrong = [
        f"{documented.name}: {what}"
        for function, documented in raising(tree)
        if not documented.name.startswith("_")
        for what in raised(function)
        if not is_documented(what, raises_section(documented))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", MODULES)
def test_modules_say_what_they_do(name):
    summary, _, rest = importlib.import_module(name).__doc__.partition("\n")
    assert summary.endswith((".", ":")), summary
    assert not rest or rest.startswith("\n"), summary


def test_private_functions_say_what_they_do():
    told, all_of_them = 0, []
    for name in MODULES:
        tree = ast.parse(inspect.getsource(importlib.import_module(name)))
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or not re.match(r"_[^_]", node.name):
                continue
            body = node.body[ast.get_docstring(node) is not None :]
            if body and node.end_lineno - body[0].lineno + 1 > 5:
                all_of_them.append(f"{name}.{node.name}")
                told += ast.get_docstring(node) is not None
    assert told >= 0.8 * len(all_of_them), f"{told} of {len(all_of_them)}"

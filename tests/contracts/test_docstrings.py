"""Contract of the docstrings: numpydoc's own validation, and what it does not check."""

import ast
import importlib
import inspect
import pkgutil
import re

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
    "YD01",
}
AT_THE_DOORS = EVERYWHERE | {"GL03", "GL06", "GL07", "SS02", "SS04", "SS05", "PR05", "PR06", "RT03"}
DOORS = [
    importlib.import_module(f"relflat_sk.{door}").__all__
    for door in ("measures", "training", "theory", "minima", "plots", "search")
]
PUBLIC = {name for names in DOORS for name in names}


def own(module, kind):
    """Functions or classes that a module defines itself."""
    return [
        value
        for name, value in vars(module).items()
        if kind(value) and value.__module__ == module.__name__
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
            if inspect.isfunction(function) and not name.startswith("_") and not inherited:
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


def raised(function):
    """Names of the exceptions that a function raises itself."""
    for node in ast.walk(function):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield ast.unparse(node.exc.func).split(".")[-1]


@pytest.mark.parametrize("name", MODULES)
def test_raised_exceptions_are_documented(name):
    tree = ast.parse(inspect.getsource(importlib.import_module(name)))
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            section = (ast.get_docstring(node) or "").partition("Raises\n------")[2]
            wrong += [f"{node.name}: {what}" for what in raised(node) if what not in section]
    assert not wrong, "\n".join(wrong)


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

"""The sources of lambdas, which tell whether a study goes on with the same ones."""

import ast
import inspect
import re
from types import FunctionType
from typing import Any

__all__ = ["source_of_lambda"]


def source_of_lambda(function: FunctionType) -> str:
    """Return the source of a lambda, which is a part of its lines."""
    try:
        tree = ast.parse("".join(inspect.findsource(function)[0]))
    except (OSError, TypeError, SyntaxError):
        return ""
    places = [(line, column) for line, _, column, _ in function.__code__.co_positions() if column]
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Lambda)
        and node.lineno == function.__code__.co_firstlineno
        and all(_begin(node.body) <= place <= _end(node.body) for place in places)
    ]
    if not around:
        return ""
    innermost = max(around, key=_begin)
    return re.sub(r"[\s\"']", "", ast.unparse(innermost))  # quotes in f-strings differ by version


def _begin(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: Any) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset

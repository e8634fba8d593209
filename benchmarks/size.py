"""Print how large the library and its tests are, package by package, and how large its surface.

Code is what remains of the lines without docstrings, comments and blank lines. The surface is the
names that can be imported from `relflat_sk`, with the parameters of functions and constructors.

Usage::

    python -m benchmarks.size
"""

import ast
import inspect
from pathlib import Path

import pandas as pd

import relflat_sk

ROOT = Path(__file__).parents[1]
TARGETS = {
    "relflat_sk": {"modules": 145, "lines": 26_000, "code": 14_000, "functions": 1_500},
    "tests": {"lines": 22_000},
}


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of the lines in docstrings."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            value = getattr(first, "value", None)
            if isinstance(first, ast.Expr) and isinstance(getattr(value, "value", None), str):
                found.update(range(first.lineno, (first.end_lineno or 0) + 1))
    return found


def weigh(path: Path) -> dict[str, int]:
    """Count the lines, the lines of code and the functions of a file."""
    source = path.read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    docstrings = docstring_lines(tree)
    code = [
        line
        for number, line in enumerate(lines, 1)
        if number not in docstrings and line.strip() and not line.strip().startswith("#")
    ]
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {"modules": 1, "lines": len(lines), "code": len(code), "functions": len(functions)}


def sizes(folder: str) -> pd.DataFrame:
    """Add up the files of each package directly in a folder."""
    root = ROOT / folder
    rows = []
    for path in root.rglob("*.py"):
        package = path.relative_to(root).parts[0]
        name = "(top)" if package == path.name else package
        rows.append({"package": name, **weigh(path)})
    table = pd.DataFrame(rows).groupby("package").sum().sort_index()
    table.loc["all"] = table.sum()
    return table


def count_parameters() -> "pd.Series[int]":
    """Count the parameters of each public function and class, the most first."""
    found = {name: getattr(relflat_sk, name) for name in relflat_sk.__all__}
    own = {n: one for n, one in found.items() if callable(one) and not is_exception(one)}
    counts = {name: len(inspect.signature(one).parameters) for name, one in own.items()}
    return pd.Series(counts).sort_values(ascending=False, kind="stable")


def is_exception(value: object) -> bool:
    """Return whether a value is a class of exceptions or warnings."""
    return isinstance(value, type) and issubclass(value, Exception)


def main() -> None:
    for folder, targets in TARGETS.items():
        table = sizes(folder)
        print(f"{folder}\n{table.to_string(float_format='{:,.0f}'.format)}")
        for what, most in targets.items():
            found = int(table.loc["all", what])
            print(f"{what}: {found:,}, at most {most:,}: {'ok' if found <= most else 'OVER'}")
        print()
    counts = count_parameters()
    print(f"{len(relflat_sk.__all__)} public names, {counts.sum()} parameters; the most have")
    print(counts.head(8).to_string())


if __name__ == "__main__":
    main()

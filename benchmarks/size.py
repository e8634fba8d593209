"""Print how large library, tests and benchmarks are, package by package, and how large the surface.

Code is what remains of the lines without docstrings, comments and blank lines. Refusals are the
lines of `raise` and `warn` with their messages; checks are refusals with the functions around them
that return nothing. The surface is the names that can be imported from `relflat_sk`, with the
parameters of functions and constructors.
"""

import ast
import inspect
from pathlib import Path

import pandas as pd

import relflat_sk

ROOT = Path(__file__).parents[1]
TARGETS = {
    "relflat_sk": {"modules": 100, "lines": 27_000, "code": 16_000, "functions": 1_500},
    "tests": {"lines": 22_000},
    "benchmarks": {"lines": 6_500},
}
MOST_REFUSALS = 0.07  # of the library's code


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
    """Count the lines of a file, those of code, of refusals and of checks, and the functions."""
    source = path.read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    docstrings = docstring_lines(tree)
    code = {
        number
        for number, line in enumerate(lines, 1)
        if number not in docstrings and line.strip() and not line.strip().startswith("#")
    }
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    refusals, checks = refusal_lines(tree), refusal_lines(tree)
    for function in functions:
        returns_nothing = getattr(function.returns, "value", function) is None
        if returns_nothing and refusal_lines(function):
            checks |= lines_of(function)
    return {
        "modules": 1,
        "lines": len(lines),
        "code": len(code),
        "functions": len(functions),
        "refusals": len(code & refusals),
        "checks": len(code & checks),
    }


def lines_of(node: ast.AST) -> set[int]:
    """Return the numbers of a node's lines."""
    return set(range(node.lineno, (node.end_lineno or 0) + 1))  # type: ignore[attr-defined]


def refusal_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of the lines of `raise` and of calls of `warn`."""
    refusals: set[int] = set()
    for node in ast.walk(tree):
        called = getattr(node, "func", None)
        name = getattr(called, "attr", getattr(called, "id", ""))
        if isinstance(node, ast.Raise) or name == "warn":
            refusals |= lines_of(node)
    return refusals


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
        if folder == "relflat_sk":
            refusals, checks = (table.loc["all", what] / table.loc["all", "code"]
                                for what in ("refusals", "checks"))  # fmt: skip
            verdict = "ok" if refusals <= MOST_REFUSALS else "OVER"
            print(f"refusals: {refusals:.1%} of the code, at most {MOST_REFUSALS:.0%}: {verdict};")
            print(f"with the functions that only check: {checks:.1%}")
        print()
    counts = count_parameters()
    print(f"{len(relflat_sk.__all__)} public names, {counts.sum()} parameters; the most have")
    print(counts.head(8).to_string())


if __name__ == "__main__":
    main()

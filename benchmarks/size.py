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
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(tree) if isinstance(node, documented)]
    docstrings = [node.body[0] for node in nodes if ast.get_docstring(node) is not None]
    return set().union(*map(lines_of, docstrings))


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
    refusals = refusal_lines(tree)
    checks = refusals.union(
        *(
            lines_of(function)
            for function in functions
            if getattr(function.returns, "value", function) is None and refusal_lines(function)
        )
    )
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
    files = {path: weigh(path) for path in root.rglob("*.py")}
    packages = ["(top)" if path.parent == root else path.relative_to(root).parts[0]
                for path in files]  # fmt: skip
    table = pd.DataFrame([*files.values()], index=packages).groupby(level=0).sum()
    table.loc["all"] = table.sum()
    return table


def count_parameters() -> "pd.Series[int]":
    """Count the parameters of each public function and class, the most first."""
    public = {name: getattr(relflat_sk, name) for name in relflat_sk.__all__}
    counts = {
        name: len(inspect.signature(value).parameters)
        for name, value in public.items()
        if callable(value) and not (isinstance(value, type) and issubclass(value, Exception))
    }
    return pd.Series(counts).sort_values(ascending=False, kind="stable")


def main() -> None:
    for folder, targets in TARGETS.items():
        table = sizes(folder)
        print(f"{folder}\n{table.to_string(float_format='{:,.0f}'.format)}")
        for what, most in targets.items():
            found = int(table.loc["all", what])
            print(f"{what}: {found:,}, at most {most:,}: {'ok' if found <= most else 'OVER'}")
        if folder == "relflat_sk":
            shares = table.loc["all", ["refusals", "checks"]] / table.loc["all", "code"]
            verdict = "ok" if shares["refusals"] <= MOST_REFUSALS else "OVER"
            print(f"refusals: {shares['refusals']:.1%} of the code, at most {MOST_REFUSALS:.0%}: ")
            print(f"{verdict}; with the functions that only check: {shares['checks']:.1%}")
        print()
    counts = count_parameters()
    print(f"{len(relflat_sk.__all__)} public names, {counts.sum()} parameters; the most have")
    print(counts.head(8).to_string())


if __name__ == "__main__":
    main()

"""Print how large the library and its tests are, package by package.

Code is what remains of the lines without docstrings, comments and blank lines.

Usage::

    python -m benchmarks.size
"""

import ast
from pathlib import Path

import pandas as pd

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


def main() -> None:
    for folder, targets in TARGETS.items():
        table = sizes(folder)
        print(f"{folder}\n{table.to_string(float_format='{:,.0f}'.format)}")
        for what, most in targets.items():
            found = int(table.loc["all", what])
            print(f"{what}: {found:,}, at most {most:,}: {'ok' if found <= most else 'OVER'}")
        print()


if __name__ == "__main__":
    main()

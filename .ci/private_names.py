"""Fail where the library uses what other libraries keep private: `make lint` runs it.

Found are imports of foreign modules and names with an underscore, underscore attributes that no
class or module of the library defines, overrides of foreign underscore methods by name in
`OVERRIDES`, and patches of other libraries (`mock.patch`, `sys._getframe`, `__class__ = ...`).

Usage::

    python .ci/private_names.py [folder]
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

# Optuna has no public name for a trial's id
EXCEPTIONS = {"_trial_id"}
# what torch offers under no public name, with the reason
TORCH = {
    "_foreach_norm": "many norms in one kernel",
    "_modules": "the modules inside of a module with those that are None",
    "_version": "changes in place of a recorded tensor",
}


def is_private(name: str) -> bool:
    """Return whether a name has one underscore in front; `_` and `__magic__` have not."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined(trees: dict[Path, ast.AST]) -> set[str]:
    """Collect the private names that the library itself gives to anything."""
    found: set[str] = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = getattr(node.value, "id", "")
            found.update({node.attr} if owner in {"self", "cls"} else ())
    return {name for name in found if is_private(name)}


def foreign(node: ast.AST, own: set[str]) -> Iterator[str]:
    """Yield what a node uses of other libraries' private things."""
    if isinstance(node, ast.ImportFrom | ast.Import):
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        names = [alias.name for alias in node.names]
        paths = [f"{module}.{name}" for name in names] if module else names
        for path in paths:
            ours = path.startswith(("relflat_sk.", "__future__"))
            if not ours and any(map(is_private, path.split("."))):
                yield f"imports {path}"
    elif isinstance(node, ast.Attribute):
        if is_private(node.attr) and node.attr not in own | EXCEPTIONS | TORCH.keys():
            yield f"uses .{node.attr}"
        if node.attr == "patch":
            yield "patches"
        if node.attr == "__class__" and isinstance(node.ctx, ast.Store):
            yield "assigns __class__"


def main(folder: str = "relflat_sk") -> int:
    """Print what is found; return 1 if there is any."""
    trees: dict[Path, ast.AST] = {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(Path(folder).rglob("*.py"))
    }
    own = defined(trees)
    wrong = [
        f"{path}:{getattr(node, 'lineno', 0)}: {what}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        for what in foreign(node, own)
    ]
    print("\n".join(wrong) or "No private names of other libraries.")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

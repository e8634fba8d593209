"""Fail where the library uses what other libraries keep private: `make lint` runs it.

Found are imports of foreign modules and names with an underscore, underscore attributes that
nothing in the library defines, `unittest.mock`, and assignments to `__class__`.

Usage::

    python .ci/private_names.py [folder]
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

# Optuna has no public name for a trial's id
EXCEPTIONS = {"_trial_id"}
# documented by Python itself
PYTHON = {"_exit", "_replace"}
# what torch offers under no public name, with the reason
TORCH = {
    "_assert": "a step of a traced network",
    "_backward_hooks": "hooks of others on a parameter",
    "_BatchNorm": "the class of all batch norms",
    "_compiled_call_impl": "whether a module is compiled in place",
    "_DropoutNd": "the class of all dropouts",
    "_foreach_mul": "many products in one kernel",
    "_foreach_mul_": "many products in one kernel",
    "_foreach_norm": "many norms in one kernel",
    "_forward_hooks": "hooks of others on a module",
    "_forward_pre_hooks": "hooks of others on a module",
    "_get_no_batch_dim": "whether an instance norm's input has an axis of samples",
    "_InstanceNorm": "the class of all instance norms",
    "_modules": "the modules inside of a module with those that are None",
    "_NormBase": "the class of all norms with statistics",
    "_opt_called": "else schedulers warn that the optimizer made no step",
    "_optimizer_step_post_hooks": "hooks of others on an optimizer",
    "_optimizer_step_pre_hooks": "hooks of others on an optimizer",
    "_orig_mod": "the module inside of a compiled one",
    "_parameters": "the parameters of a module itself, by name, with those that it shares",
    "_post_accumulate_grad_hooks": "hooks of others on a parameter",
    "_reversed_padding_repeated_twice": "padding as torch's own forward passes it on",
    "_saved_count_include_pad": "what a node of autograd's graph computed with",
    "_saved_dilation": "the same",
    "_saved_divisor_override": "the same",
    "_saved_kernel_size": "the same",
    "_saved_negative_slope": "the same",
    "_saved_padding": "the same",
    "_saved_other": "the same",
    "_saved_result": "the same",
    "_saved_stride": "the same",
    "_version": "changes in place of a recorded tensor",
    "_weight_norm": "the function of weight norm",
}
ALLOWED = EXCEPTIONS | PYTHON | TORCH.keys()


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
        if "unittest.mock" in {module, *paths}:
            yield "imports unittest.mock"
        for path in paths:
            private = {part for part in path.split(".") if is_private(part)}
            if private - ALLOWED and not path.startswith(("relflat_sk.", "__future__")):
                yield f"imports {path}"
    elif isinstance(node, ast.Attribute):
        if is_private(node.attr) and node.attr not in own | ALLOWED:
            yield f"uses .{node.attr}"
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

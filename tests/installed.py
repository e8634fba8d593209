"""Run the README's examples with an installed package, as `make test-dist` does."""

import re
from pathlib import Path

import relflat_sk

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    assert ROOT / "relflat_sk" not in Path(relflat_sk.__file__).resolve().parents, (
        "not the installed package"
    )
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert examples
    for example in examples:
        exec(example, {})
    print(f"{len(examples)} examples of the README ran with {relflat_sk.__file__}")

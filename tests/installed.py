"""Run README's and start page's examples with an installed package, as `make test-dist` does."""

import re
from pathlib import Path

import relflat_sk

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    assert ROOT / "relflat_sk" not in Path(relflat_sk.__file__).resolve().parents, (
        "not the installed package"
    )
    for page in ("README.md", "docs/start.md"):
        examples = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        assert examples
        exec("\n".join(examples), {})
        print(f"{len(examples)} examples of {page} ran with {relflat_sk.__file__}")

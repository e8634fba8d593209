"""Print the lowest versions that pyproject.toml allows, for `make test-lowest`.

The lines are pip's requirements. Left out are torch, whose build constraints.txt pins, and other
libraries' trainers, whose tests are skipped without them.
"""

import re
import tomllib
from pathlib import Path

LEFT_OUT = {"torch", "relflat_sk", "lightning", "transformers", "accelerate"}

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]

if __name__ == "__main__":
    for line in [*project["dependencies"], *extras["plot"], *extras["test"]]:
        name, bound = re.fullmatch(r"([\w-]+)(?:\[.*\])?(?:>=(.*))?", line).groups()
        if name not in LEFT_OUT:
            print(f"{name}=={bound}")

"""Seconds of a fresh interpreter: for torch, for the library, and to the README's first number."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks._harness.options import read_options
from benchmarks._harness.timing import Budget, environment, interleave, ratio, verdict

README = Path(__file__).parents[2] / "README.md"
OTHERS = "import torch, pandas, scipy.optimize, sklearn.pipeline, skorch"


def main() -> None:
    """Print the times, and judge their ratios."""
    options = read_options(__doc__, rounds=(7, 1))
    print(environment())
    first_example = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)[0]
    programs = {
        "nothing": "",
        "import torch": "import torch",
        "import relflat_sk": "import relflat_sk",
        "import torch, pandas, scikit-learn and skorch": OTHERS,
        "import relflat_sk.relative_flatness": "from relflat_sk import relative_flatness",
        "the README's first number": first_example,
    }
    ways = {
        name: partial(
            subprocess.run, [sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL
        )
        for name, program in programs.items()
    }
    times = interleave(ways, options.rounds)
    for name, seconds in times.items():
        print(f"{name}: {median(seconds):.2f} s")
    of_torch = ratio(times["import relflat_sk"], times["import torch"])
    of_first_name = ratio(
        times["import relflat_sk.relative_flatness"],
        times["import torch, pandas, scikit-learn and skorch"],
    )
    budgets = [
        Budget("import relflat_sk / import torch", of_torch.value, 1.3),
        Budget("the first public name / what it imports", of_first_name.value, 1.3),
        Budget(
            "seconds to the README's first number", median(times["the README's first number"]), 60
        ),
    ]
    sys.exit(verdict(budgets, judged=not options.quick))


if __name__ == "__main__":
    main()

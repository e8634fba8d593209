"""Seconds of a fresh interpreter: for torch, for the library, and to the README's first number."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks._harness.options import read_options
from benchmarks._harness.timing import Budget, compare, environment, interleave, ratio, verdict

README = Path(__file__).parents[2] / "README.md"
OTHERS = "import torch, pandas, scipy.optimize, sklearn.pipeline, skorch"


def main() -> None:
    options = read_options(__doc__, rounds=(7, 1))
    print(environment())
    first_example = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)[0]
    libraries, first_name = "torch, pandas, scikit-learn and skorch", "the first public name"
    programs = {
        "nothing": "",
        "import torch": "import torch",
        "import relflat_sk": "import relflat_sk",
        libraries: OTHERS,
        first_name: "from relflat_sk import relative_flatness",
        "the README's first number": first_example,
    }
    ways = {
        name: partial(
            subprocess.run, [sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL
        )
        for name, program in programs.items()
    }
    times = interleave(ways, options.rounds)
    print(compare(times).to_string())
    of_torch = ratio(times["import relflat_sk"], times["import torch"])
    of_libraries = ratio(times[first_name], times[libraries])
    budgets = [
        Budget("import relflat_sk / import torch", of_torch.value, 1.3),
        Budget("the first public name / what it imports", of_libraries.value, 1.3),
        Budget("seconds to the README's first number", median(times[[*ways][-1]]), 60),
    ]
    sys.exit(verdict(budgets, judged=not options.quick))


if __name__ == "__main__":
    main()

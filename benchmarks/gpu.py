"""Run on a CUDA device what needs one, in the order of worth, each part under its own time limit.

Each part writes into its file in `benchmarks/results/cuda/` while it runs, so that a device that is
taken away leaves what was done. The minima of the papers go on where the last run ended.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._harness.options import IMAGES, read_options

RESULTS = Path(__file__).parent / "results" / "cuda"


@dataclass(frozen=True)
class Part:
    """A module with its arguments, and the seconds after which it is stopped."""

    command: str
    seconds: int
    needs_images: bool = False


PARTS = {
    "devices": Part("pytest -q tests/devices/values.py tests/devices/trainings.py", 150),
    "heads": Part("benchmarks.costs.heads", 60),
    "steps": Part("benchmarks.costs.training --steps 100", 120),
    "p21": Part("benchmarks.papers.p21_figure_5 --full", 540, needs_images=True),
    "p19": Part("benchmarks.papers.p19_figures_2_to_4 --full", 540, needs_images=True),
    "scoring": Part("benchmarks.costs.scoring --rounds 5", 90),
    "tests": Part("pytest -q -m gpu tests --ignore tests/devices", 120),
    "speedrun": Part(
        "benchmarks.worth.speedrun --results benchmarks/results/cuda/speedrun.csv", 480, True
    ),
}


def arguments_of(part: Part, device: str, images: str | None, *, quick: bool) -> list[str]:
    """Return the command line of a part on a device; without one, that of a smoke run."""
    module, *arguments = part.command.split()
    if module == "pytest":
        return [module, "-p", "no:cacheprovider", *arguments, *["--collect-only"] * quick]
    if quick:
        arguments = [*["--full"] * ("--full" in arguments), "--quick"]
    if part.needs_images and images:
        arguments += ["--data", str(images)]
    return [module, *arguments, "--device", device]


def run(arguments: Sequence[str], device: str, file: Path, seconds: float) -> str:
    """Run a module with its output in a file, and say how it ended."""
    # a warning of another plugin of the machine would end the tests before the first one
    variables = os.environ | {"PYTHONUNBUFFERED": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if device != "cpu":  # where there is none, tests/devices simulates one
        variables["RELFLAT_SK_TEST_DEVICE"] = device
    start = time.monotonic()
    with file.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", *arguments], stdout=output, env=variables,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            end = f"ended with code {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
            process.wait()
            end = "was stopped"
        end += f" after {time.monotonic() - start:.0f} s"
        output.write(f"\n{' '.join(arguments)} {end}\n")
    return end


def main(argv: Sequence[str] | None = None) -> int:
    options = read_options(
        __doc__, argv, part=PARTS, device="cuda", data=IMAGES, minutes=9.0, folder=RESULTS
    )
    options.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    ends = {}
    for name in options.part:
        part, left = PARTS[name], deadline - time.monotonic()
        if part.needs_images and not (options.data or options.quick):
            ends[name] = "needs --data"
        elif left <= 0:
            ends[name] = "had no time left"
        else:
            arguments = arguments_of(part, options.device, options.data, quick=options.quick)
            file = options.folder / f"{name}.txt"
            ends[name] = run(arguments, options.device, file, min(part.seconds, left))
        print(f"{name}: {ends[name]}", flush=True)
    return int(not all(end.startswith("ended with code 0") for end in ends.values()))


if __name__ == "__main__":
    raise SystemExit(main())

"""Run a benchmark as its command, in a process of its own."""

from tests.processes import run_module


def run(module, *arguments, **variables):
    done = run_module(module, *arguments, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout

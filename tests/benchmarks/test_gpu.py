"""The script of what needs a GPU: parts end in time, and leave what they have printed."""

from importlib.util import find_spec

import pytest

from benchmarks import gpu

SLEEP = "print('begun', flush=True); __import__('time').sleep(60)"


def test_a_part_that_takes_too_long_is_stopped_and_leaves_what_it_printed(tmp_path):
    end = gpu.run(["timeit", "-n1", "-r1", SLEEP], "cpu", tmp_path / "part.txt", 5)
    assert end.startswith("was stopped")
    assert (tmp_path / "part.txt").read_text().startswith("begun")


@pytest.mark.parametrize(("part", "code"), [("heads", 0), ("p21", 1)])
def test_minutes_and_images_decide_what_runs(part, code, tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(gpu, "IMAGES", str)
    monkeypatch.setattr(gpu, "run", lambda *args: ran.append(args) or "ended with code 0")
    assert gpu.main(["--part", part, "--folder", str(tmp_path)]) == code
    assert len(ran) == 1 - code
    assert ("needs --data" in capsys.readouterr().out) == bool(code)
    assert gpu.main(["--part", part, "--folder", str(tmp_path), "--minutes", "0"]) == 1


@pytest.mark.parametrize("name", gpu.PARTS)
def test_parts_are_modules_that_take_their_arguments(name):
    module, *arguments = gpu.arguments_of(gpu.PARTS[name], "cuda", "images.npz", quick=False)
    assert find_spec(module)
    assert ("--data" in arguments) == gpu.PARTS[name].needs_images
    assert ("cuda" in arguments) == (module != "pytest")

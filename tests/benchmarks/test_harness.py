"""The parts that benchmarks share: images from a file, and ways that are timed in turn."""

import io
from functools import partial
from itertools import permutations

import numpy as np
import pytest

from benchmarks._harness import data, timing


def test_images_come_from_a_file_and_are_decoded_once(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    files, classes = [], np.arange(6, dtype=np.uint8)
    for _ in classes:
        file = io.BytesIO()
        pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        image.fromarray(pixels).save(file, "JPEG")
        files.append(np.frombuffer(file.getvalue(), dtype=np.uint8))
    np.savez(
        tmp_path / "cifar.npz",
        jpeg=np.concatenate(files),
        offsets=np.cumsum([0, *map(len, files)]),
        y=classes,
        is_train=np.array([True, True, False, True, True, True]),
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for _ in range(2):
        X, y = data.load_images(4, tmp_path / "cifar.npz")
        assert X.shape == (4, 3, 32, 32)
        assert y.tolist() == [0, 1, 3, 4]
        assert round(abs(X.mean().item()), 3) == 0
        monkeypatch.delattr(data, "_decode", raising=False)  # the second time from the cache
    assert len(list((tmp_path / "cache" / "relflat_sk").iterdir())) == 1


def test_every_way_has_its_turn_in_each_round_in_changing_orders(monkeypatch):
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)  # takes long after many tests
    calls = []
    ways = {name: partial(calls.append, name) for name in ("a", "b", "c")}
    times = timing.interleave(ways, rounds=40, warmup=2)
    rounds = [tuple(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert len(rounds) == 42
    assert set(rounds) == set(permutations("abc"))
    lengths = {name: len(seconds) for name, seconds in times.items()}
    assert lengths == dict.fromkeys("abc", 40)

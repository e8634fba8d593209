"""Steps of pipelines that do not transform each row by itself."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from torch.utils.data import TensorDataset

from relflat_sk import relative_flatness
from tests.data_kinds import ComputedRows, memmap

RNG = np.random.default_rng(0)
X = RNG.normal(size=(500, 6)).astype(np.float32)
Y = (X[:, 0] + 0.3 * RNG.normal(size=500) > 0).astype(int)


def of_all_rows(X):
    X = np.asarray(X)
    return (X - X.mean(axis=0)) / X.std(axis=0)


def with_text(X):
    return np.asarray(X).astype(str)


def to_numbers(X):
    return np.asarray(X).astype(float)


STEPS = {
    "depends on all rows": [FunctionTransformer(of_all_rows)],
    "depends on all rows, later": [StandardScaler(), FunctionTransformer(of_all_rows)],
    "by text": [FunctionTransformer(with_text), FunctionTransformer(to_numbers)],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("kind", ["mapped", "on disk"])
def test_values_are_those_of_an_array_in_memory(steps, kind, tmp_path):
    model = make_pipeline(*steps, LogisticRegression()).fit(X, Y)
    expected = float(relative_flatness(model, X, Y))
    data = memmap(tmp_path, X) if kind == "mapped" else ComputedRows(X)
    found = relative_flatness(model, data, Y, batch_size=32)
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_steps_that_depend_on_all_rows_refuse_data_sets():
    model = make_pipeline(*STEPS["depends on all rows"], LogisticRegression()).fit(X, Y)
    data = TensorDataset(torch.as_tensor(X), torch.as_tensor(Y))
    with pytest.raises(ValueError, match="does not transform each row by itself.*Give X as an arr"):
        relative_flatness(model, data, None)


class Projects:
    """A transformer made of torch, which does not mind the caller's mixed precision."""

    def fit(self, X, y=None):
        return self

    def transform(self, X):
        with torch.no_grad():
            return torch.tensor(X).mul(3).matmul(torch.eye(6) / 3).float().numpy()


def test_steps_do_not_see_the_caller_s_mixed_precision():
    model = make_pipeline(Projects(), LogisticRegression()).fit(X, Y)
    expected = relative_flatness(model, X, Y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert relative_flatness(model, X, Y) == expected
        assert torch.is_autocast_enabled("cpu")

"""Arrays whose type torch does not know: of another byte order, and of extended precision."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from scipy.sparse import csr_matrix
from torch import nn

from relflat_sk import RelativeFlatnessRegularizedClassifier, relative_flatness
from relflat_sk._numerics import native
from tests.data_kinds import ComputedRows

X = np.random.default_rng(0).normal(size=(30, 4)).round(2).astype(np.float32)
Y = np.arange(30) % 3
FOREIGN = [np.dtype(np.float32).newbyteorder("S"), np.dtype(np.longdouble)]
KINDS = {
    "array": lambda X: X,
    "dict": lambda X: {"input": X},
    "sparse": csr_matrix,
    "computed": ComputedRows,
}


def test_the_type_that_torch_knows():
    swapped = np.dtype(np.int16).newbyteorder("S")
    found = native(np.arange(3, dtype=swapped))
    assert found.dtype == np.int16
    assert found.tolist() == [0, 1, 2]
    assert native(np.ones(2, np.longdouble)).dtype == np.float64
    assert native(X) is X


@pytest.mark.parametrize("dtype", FOREIGN, ids=["swapped", "longdouble"])
@pytest.mark.parametrize("kind", KINDS)
def test_measures_and_nets_take_them(kind, dtype):
    make = KINDS[kind]
    if kind == "sparse" and not dtype.isnative:
        pytest.skip("scipy has no sparse matrices of another byte order")
    net = nn.Linear(4, 3)
    labels = Y.astype(np.dtype(int).newbyteorder("S"))

    def measured(X, y):
        return relative_flatness(net, make(X), y, criterion=nn.CrossEntropyLoss())

    assert measured(X.astype(dtype), labels) == measured(X, Y)

    def trained(data):
        net = RelativeFlatnessRegularizedClassifier(
            nn.Linear, module__in_features=4, module__out_features=3, max_epochs=2, random_state=0,
            verbose=0,
        )  # fmt: skip
        return net.fit(make(data), Y).predict_proba(make(data))

    assert_array_equal(trained(X.astype(dtype)), trained(X.astype(native(X.astype(dtype)).dtype)))

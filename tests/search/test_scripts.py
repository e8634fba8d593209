"""Tests of several processes with classes and functions of a script, a notebook, a function."""

import os
import pickle
import subprocess
import sys
import threading

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from sklearn.datasets import load_iris
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback
from torch import nn

from relflat_sk import FlatMinimaSearch, RelativeFlatnessRegularizedClassifier
from relflat_sk.search._transfer import ByValue, packed, unpacked

X, Y = load_iris(return_X_y=True)
X = X.astype(np.float32)

DEFINITIONS = """
import numpy as np
from sklearn.datasets import load_iris
from skorch.callbacks import Callback
from torch import nn
from relflat_sk import FlatMinimaSearch, RelativeFlatnessRegularizedClassifier

class Net(nn.Module):
    def __init__(self, n_features, n_outputs, activation=nn.ReLU):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(n_features, 8), activation(), nn.Linear(8, n_outputs)
        )

    def forward(self, x):
        return self.layers(x)

class Counter(Callback):
    def on_epoch_end(self, net, **kwargs):
        self.count_ = getattr(self, "count_", 0) + 1
"""

SEARCH = """
def search(n_jobs):
    X, y = load_iris(return_X_y=True)
    net = RelativeFlatnessRegularizedClassifier(Net, max_epochs=10, verbose=0, callbacks=[Counter])
    space = {
        "module__activation": [nn.Tanh, lambda: nn.LeakyReLU(0.2)],
        "lr": lambda trial: 0.01,  # not by number: processes take turns in any order
    }
    search = FlatMinimaSearch(net, space, n_jobs=n_jobs, random_state=0)
    return search.fit(X.astype(np.float32), y)

one, two = search(1), search(2)
assert one.minima_["relative_flatness"].tolist() == two.minima_["relative_flatness"].tolist()
assert type(two.best_estimator_.module_) is Net
assert dict(two.best_estimator_.callbacks_)["Counter"].count_ == 10
print("done")
"""


def test_script_defines_module_callback_and_functions(tmp_path):
    script = tmp_path / "script.py"
    guarded = "".join(f"    {line}\n" for line in SEARCH.splitlines())
    script.write_text(f'{DEFINITIONS}\nif __name__ == "__main__":\n{guarded}', encoding="utf-8")
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, env=os.environ
    )
    assert run.stdout == "done\n", run.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of the notebook's own libraries
def test_notebook_defines_module_callback_and_functions():
    cells = [nbformat.v4.new_code_cell(code) for code in (DEFINITIONS, SEARCH)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, kernel_name="python3", timeout=300).execute()
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    assert "".join(output["text"] for output in outputs if output.name == "stdout") == "done\n"


def local_parts():
    """Classes and functions that no other process can import."""
    width = 8

    class Net(nn.Module):
        def __init__(self, n_features=4, n_outputs=3, activation=nn.ReLU):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(n_features, width), activation(), nn.Linear(width, n_outputs)
            )

        def forward(self, x):
            return self.layers(x)

    class Loss(nn.CrossEntropyLoss):
        pass

    return Net, Loss


def our_net(module, loss):
    return RelativeFlatnessRegularizedClassifier(module, max_epochs=10, verbose=0)


def plain_net(module, loss):
    return NeuralNetClassifier(module, criterion=loss, max_epochs=20, lr=0.1, verbose=0)


def module_instance(module, loss):
    return RelativeFlatnessRegularizedClassifier(module(), max_epochs=10, verbose=0)


def local_pipeline(module, loss):
    return make_pipeline(FunctionTransformer(lambda x: 2 * x), our_net(module, loss))


@pytest.mark.parametrize("make", [our_net, plain_net, module_instance, local_pipeline])
def test_workers_train_what_a_function_defines(make):
    module, loss = local_parts()
    estimator = make(module, loss)
    prefix = f"{estimator.steps[-1][0]}__" if hasattr(estimator, "steps") else ""
    space = {f"{prefix}lr": [0.05, 0.1]}
    tables, predicted = [], []
    for n_jobs in (1, 2):
        search = FlatMinimaSearch(estimator, space, n_jobs=n_jobs, goal=1.0, random_state=0).fit(
            X, Y
        )
        tables.append(search.minima_["relative_flatness"].tolist())
        predicted.append(search.predict_proba(X))
    assert tables[0] == tables[1]
    np.testing.assert_array_equal(*predicted)


def test_nets_of_a_function_are_choices_of_a_space():
    module, loss = local_parts()
    net = our_net(module, loss)
    space = {"relativeflatnessregularizedclassifier": [net, plain_net(module, loss)]}
    search = FlatMinimaSearch(make_pipeline(net), space, n_jobs=2, goal=1.0, random_state=0).fit(
        X, Y
    )
    assert search.minima_["state"].eq("complete").all()


class HoldsLock(Callback):
    """Has something that no process can send to another."""

    def on_train_begin(self, net, **kwargs):
        self.lock_ = threading.Lock()


def test_network_that_cannot_be_sent_is_trained_again():
    net = RelativeFlatnessRegularizedClassifier(max_epochs=10, verbose=0, callbacks=[HoldsLock])
    space = {"lr": [0.01, 0.02]}
    one, two = (
        FlatMinimaSearch(net, space, n_jobs=n_jobs, goal=1.0, random_state=0).fit(X, Y)
        for n_jobs in (1, 2)
    )
    assert one.best_params_ == two.best_params_
    np.testing.assert_array_equal(one.predict_proba(X), two.predict_proba(X))


def test_values_arrive_as_they_are():
    module, loss = local_parts()
    net = our_net(module, loss).fit(X, Y)
    for arrived in (pickle.loads(pickle.dumps(ByValue(net))), unpacked(packed(net))):
        np.testing.assert_array_equal(arrived.predict_proba(X), net.predict_proba(X))
    assert packed(threading.Lock()) is None

"""What measures find beside their values: standard errors, the mean loss, the best constant's."""

from relflat_sk._models.network_of import open_model
from relflat_sk.measures._measure_network import OF_DATA, measure_opened
from relflat_sk.measures._results import range_of


def opened(name, model, X, y=None, *, layer=-1, **params):
    """Return the handle of a model, and what a measure finds."""
    of_data = {key: params.pop(key) for key in OF_DATA & params.keys()}
    network = open_model(model, X, y, **of_data, in_order=params.get("per_sample", False))
    return network, measure_opened(network, name, layer=layer, **params)


def evaluate(name, model, X, y=None, **params):
    """Return what a measure finds."""
    return opened(name, model, X, y, **params)[1]


def constant_loss(model, X, y, **of_data):
    """Return the mean loss of the best constant prediction."""
    network, measured = opened("relative_flatness", model, X, y, **of_data)
    return range_of(network, measured.passes).constant

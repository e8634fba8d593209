"""A skorch net with faster data loaders and optimizers, where these change no results."""

from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from relflat_sk.training._array_loader import make_loader
from relflat_sk.training._sklearn_net import SklearnNet

__all__ = ["FastNet"]


class FastNet(SklearnNet):
    """Cut batches out of arrays.

    Parameters
    ----------
    *args, **kwargs
        Arguments of `skorch.NeuralNet`.
    """

    def get_iterator(self, dataset: Any, training: bool = False) -> Any:
        """Make the iterator over the batches of a data set, as skorch does.

        Parameters
        ----------
        dataset : torch Dataset
            The data.
        training : bool, default=False
            Whether to use `iterator_train` instead of `iterator_valid`.

        Returns
        -------
        iterable
            A data loader. Arrays are cut into batches without torch's loader, unless the user
            chose a loader or passed it arguments such as `collate_fn`.
        """
        name = "iterator_train" if training else "iterator_valid"
        iterator, arguments = getattr(self, name), self.get_params_for(name)
        arguments["batch_size"] = _batch_size(arguments.get("batch_size", self.batch_size), dataset)
        # accelerate takes torch's loader apart and makes its own of the parts
        if iterator is DataLoader and getattr(self, "accelerator", None) is None:
            return make_loader(dataset, arguments)
        return iterator(dataset, **arguments)


def _batch_size(size: Any, dataset: Any) -> Any:
    """Return the number of samples in a batch, as torch's loader takes it."""
    if isinstance(size, np.integer):
        size = int(size)
    return len(dataset) if size == -1 else size

"""The means of an epoch's batches, in one pass over its history."""

from typing import Any

import numpy as np
from skorch.callbacks import PassthroughScoring
from skorch.history import History

__all__ = ["EpochMean"]


class EpochMean(PassthroughScoring):
    """Record what skorch's `PassthroughScoring` records, in less time."""

    def on_epoch_end(self, net: Any, **kwargs: Any) -> None:
        """Record the mean over the batches, weighted by their sizes."""
        history = net.history
        if type(history) is not History:
            super().on_epoch_end(net, **kwargs)
            return
        name, size = self.name, "train_batch_size" if self.on_train else "valid_batch_size"
        epoch = list.__getitem__(history, -1)  # `record` would find it anew
        batches = epoch["batches"]
        scores = [batch[name] for batch in batches if name in batch]
        if not scores:
            return
        weights = np.array([batch[size] for batch in batches if name in batch], dtype=np.float64)
        # as np.average, which looks at shapes and types for twice as long
        score = epoch[name] = np.multiply(scores, weights).sum() / weights.sum()
        is_best = self._is_best_score(score)
        if is_best:
            self.best_score_ = score
        if is_best is not None:
            epoch[f"{name}_best"] = bool(is_best)

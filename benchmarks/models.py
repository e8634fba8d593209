"""The network that the budgets are stated for."""

from torch import Tensor, nn

__all__ = ["Head", "LeNet5"]


class LeNet5(nn.Module):
    """LeNet-5 as it is commonly trained on CIFAR-10: ReLU, max pooling.

    `features` ends in 84 numbers per image, `head` turns them into 10 logits; flatness is
    measured at `head`, the last layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
        )
        self.head = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Turn (n, 3, 32, 32) images into (n, 10) logits."""
        return self.head(self.features(x))


class Head(nn.Module):
    """The last layer of a `LeNet5` by itself, to be run on its features.

    Parameters
    ----------
    network : LeNet5
    """

    def __init__(self, network: LeNet5) -> None:
        super().__init__()
        self.head = network.head

    def forward(self, features: Tensor) -> Tensor:
        """Turn (n, 84) features into (n, 10) logits."""
        return self.head(features)

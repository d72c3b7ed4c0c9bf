"""A Flower app with a model, data and a training loop, in both of Flower's APIs.

``app`` uses the message API, ``client_fn`` the older one. Both train by SGD on the examples in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

BATCH = 16
PARTITION = 48


class Net(nn.Module):
    def __init__(self, input_shape: Any = None, classes: int = 10) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Linear(12, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.norm(self.hidden(x.flatten(1)))))


def load_data(partition: int, partitions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every ``partitions``-th digit: the first 48, or 32 if ``partition`` is odd."""
    digits = load_digits()
    own = slice(partition, None, partitions)
    count = PARTITION - BATCH * (partition % 2)
    x, y = digits.data[own][:count] / 16.0, digits.target[own][:count]
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y)


def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor, lr: float) -> float:
    net.train()
    sgd = torch.optim.SGD(net.parameters(), lr=lr)
    for first in range(0, len(y), BATCH):
        loss = cross_entropy(net(x[first : first + BATCH]), y[first : first + BATCH])
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    return loss.item()


def of(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    return load_data(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))


app = ClientApp()


@app.train()
def train_message(message: Message, context: Context) -> Message:
    net, (x, y) = Net(), of(context)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss = train(net, x, y, message.content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(y)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)


class Digits(NumPyClient):
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.net, self.x, self.y = Net(), x, y

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        tensors = [torch.as_tensor(np.asarray(array)) for array in parameters]
        self.net.load_state_dict(dict(zip(self.net.state_dict(), tensors, strict=True)))
        loss = train(self.net, self.x, self.y, config["lr"])
        arrays = [tensor.numpy() for tensor in self.net.state_dict().values()]
        return arrays, len(self.y), {"train_loss": loss}


def client_fn(context: Context) -> Any:
    return Digits(*of(context)).to_client()

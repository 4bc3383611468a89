"""Train Flower's clients.

This is a module of its own: ray's actors import it by name, so that what it caches outlives a call.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from .net import build, sgd
from .work import Work, load

EXPORT = "SECURECLUSTER_PEERS_EXPORT"
DEVICE = "SECURECLUSTER_PEERS_DEVICE"
app = ClientApp()


@cache
def setup() -> tuple[Work, torch.nn.Module, torch.optim.Optimizer, str]:
    """Return what an actor keeps between calls: the data, network, optimizer and device."""
    # ray has one actor a core
    torch.set_num_threads(1)
    device = os.environ[DEVICE]
    work = load(os.environ[EXPORT])
    net = build(work, device)
    optimizer = torch.optim.SGD(net.parameters(), lr=work.lr)
    return work, net, optimizer, device


@app.train()  # type: ignore[untyped-decorator]
def train(message: Any, context: Context) -> Any:
    """Train for one pass over the client's samples from the global model.

    Args:
        message: holds the global model and the round.
        context: names the client.

    Returns:
        The reply with the trained model.
    """
    work, net, optimizer, device = setup()
    received = message.content
    net.load_state_dict(received["arrays"].to_torch_state_dict())
    client = int(context.node_config["partition-id"])
    # Flower counts rounds from 1
    number = int(received["config"]["server-round"]) - 1
    order = work.order[number, client]
    images = work.images(client)[order]
    labels = work.y[client][order]
    x = torch.as_tensor(images).to(device)
    y = torch.as_tensor(labels).to(device)
    sgd(net, optimizer, x, y, work.batch)
    content = {
        "arrays": ArrayRecord(net.state_dict()),
        # FedAvg's weights, which are equal here, as the plain loop's are
        "metrics": MetricRecord({"num-examples": len(y)}),
    }
    return Message(RecordDict(content), reply_to=message)

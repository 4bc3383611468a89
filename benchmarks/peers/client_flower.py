"""Flower's client side, a module of its own: ray's actors import it by name, so that what it caches
outlives a call.
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

EXPORT, DEVICE = "SECURECLUSTER_PEERS_EXPORT", "SECURECLUSTER_PEERS_DEVICE"
app = ClientApp()


@cache
def setup() -> tuple[Work, torch.nn.Module, torch.optim.Optimizer, str]:
    """What an actor keeps between calls: the data, one network, one optimizer."""
    torch.set_num_threads(1)
    device = os.environ[DEVICE]
    work = load(os.environ[EXPORT])
    net = build(work, device)
    return work, net, torch.optim.SGD(net.parameters(), lr=work.lr), device


@app.train()  # type: ignore[untyped-decorator]
def train(message: Any, context: Context) -> Any:
    """One pass over the client's samples from the global model."""
    work, net, optimizer, device = setup()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    client, number = (
        int(context.node_config["partition-id"]),
        int(message.content["config"]["server-round"]) - 1,
    )
    order = work.order[number, client]
    x, y = (
        torch.as_tensor(part[order]).to(device) for part in (work.images(client), work.y[client])
    )
    sgd(net, optimizer, x, y, work.batch)
    content = {
        "arrays": ArrayRecord(net.state_dict()),
        "metrics": MetricRecord({"num-examples": len(y)}),
    }
    return Message(RecordDict(content), reply_to=message)

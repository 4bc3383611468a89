"""Train by the plain loop: one network, client after client, by `torch.optim.SGD`.

The global model is the mean of the clients' models.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from .net import build, flat, put, sgd, talk
from .work import Options, Quit, load, options


def main(arguments: Options) -> None:
    """Train rounds until the driver quits."""
    device = arguments.device
    torch.set_num_threads(arguments.threads)
    work = load(arguments.export)
    net = build(work, device)
    x = []
    for client in range(work.clients):
        images = torch.as_tensor(work.images(client))
        x.append(images.to(device))
    y = torch.as_tensor(work.y).to(device)
    # one for all clients: plain SGD has no state that would pass from one to the next
    optimizer = torch.optim.SGD(net.parameters(), lr=work.lr)
    pipe = talk(work, net, arguments)
    with suppress(Quit):
        for number in range(len(work.order)):
            pipe.begin()
            order = torch.as_tensor(work.turn(number)).to(device)
            start = flat(net)
            model_sum = torch.zeros_like(start)
            for client in range(work.clients):
                rows = order[client]
                put(net, start)
                sgd(net, optimizer, x[client][rows], y[client][rows], work.batch)
                # unweighted, since all clients have equally many samples
                model_sum += flat(net)
            put(net, model_sum / work.clients)
            pipe.end()
        pipe.begin()


if __name__ == "__main__":
    main(options())

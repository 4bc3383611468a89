"""Train one centralised model on all samples.

Step s of a round takes the samples of all clients' steps s together, (clients × batch) samples.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from .net import build, sgd, talk
from .work import Options, Quit, load, options, scaled


def main(arguments: Options) -> None:
    """Train rounds of as many samples as the federated ones, until the driver quits."""
    device = arguments.device
    torch.set_num_threads(arguments.threads)
    work = load(arguments.export)
    net = build(work, device)
    x = torch.as_tensor(scaled(work.x)).to(device).flatten(0, 1)
    y = torch.as_tensor(work.y).to(device).flatten()
    optimizer = torch.optim.SGD(net.parameters(), lr=work.lr)
    samples = work.y.shape[1]
    # of each client's first sample in the concatenation, (m, 1)
    offsets = torch.arange(work.clients)[:, None] * samples
    pipe = talk(work, net, arguments)
    with suppress(Quit):
        for number in range(len(work.order)):
            pipe.begin()
            order = torch.as_tensor(work.turn(number))
            positions = (order + offsets).to(device)
            # as many steps as one client has, each on the mini-batches of all clients at once
            for columns in positions.split(work.batch, dim=1):
                batch = columns.flatten()
                sgd(net, optimizer, x[batch], y[batch], len(batch))
            pipe.end()
        pipe.begin()


if __name__ == "__main__":
    main(options())

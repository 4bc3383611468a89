"""One centralised model on all samples: step s of a round takes what the clients' steps s take
together, (clients × batch) samples.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from .net import build, sgd, talk
from .work import Options, Quit, load, options, scaled


def main(given: Options) -> None:
    """Rounds of as many samples as the federated ones, until the driver quits."""
    torch.set_num_threads(given.threads)
    work = load(given.export)
    net = build(work, given.device)
    x = torch.as_tensor(scaled(work.x)).to(given.device).flatten(0, 1)
    y = torch.as_tensor(work.y).to(given.device).flatten()
    optimizer = torch.optim.SGD(net.parameters(), lr=work.lr)
    first = torch.arange(work.clients)[:, None] * work.y.shape[1]
    pipe = talk(work, net, given)
    with suppress(Quit):
        for number in range(len(work.order)):
            pipe.begin()
            order = (torch.as_tensor(work.turn(number)) + first).to(given.device)
            for part in order.split(work.batch, dim=1):
                own = part.flatten()
                sgd(net, optimizer, x[own], y[own], len(own))
            pipe.end()
        pipe.begin()


if __name__ == "__main__":
    main(options())

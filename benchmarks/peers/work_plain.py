"""The plain loop: one network, client after client, `torch.optim.SGD`, the mean of what they end
with.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from .net import build, flat, put, sgd, talk
from .work import Options, Quit, load, options


def main(given: Options) -> None:
    """Rounds until the driver quits."""
    torch.set_num_threads(given.threads)
    work = load(given.export)
    net = build(work, given.device)
    x = [torch.as_tensor(work.images(i)).to(given.device) for i in range(work.clients)]
    y = torch.as_tensor(work.y).to(given.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=work.lr)
    pipe = talk(work, net, given)
    with suppress(Quit):
        for number in range(len(work.order)):
            pipe.begin()
            order = torch.as_tensor(work.turn(number)).to(given.device)
            start = flat(net)
            total = torch.zeros_like(start)
            for i in range(work.clients):
                put(net, start)
                sgd(net, optimizer, x[i][order[i]], y[i][order[i]], work.batch)
                total += flat(net)
            put(net, total / work.clients)
            pipe.end()
        pipe.begin()


if __name__ == "__main__":
    main(options())

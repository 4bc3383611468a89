"""Train by Flower's simulation, on ray actors of one core each.

Its FedAvg strategy is called round by round as `Strategy.start` does.

`flwr.simulation.run_simulation` is deprecated in favour of `flwr run`, which starts a server of its
own and leaves it running; both use the same simulation engine, and this one ends with its process.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from .client_flower import DEVICE, EXPORT, app
from .net import accuracy, build, flat
from .work import Options, Quit, Talk, Weights, Work, load, options, processes


class Server:
    """The server's loop, held before each round."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._net = build(work)
        self._arrays = ArrayRecord(self._net.state_dict())
        self._pipe = Talk(self.weights, partial(accuracy, work))

    def weights(self) -> Weights:
        """Return the global model (d,)."""
        state = self._arrays.to_torch_state_dict()
        self._net.load_state_dict(state)
        return np.asarray(flat(self._net).numpy(), dtype=np.float32)

    def main(self, grid: Grid, context: Context) -> None:
        """Train rounds until the driver quits.

        Args:
            grid: sends messages to the clients.
            context: of Flower's app; not needed here.
        """
        clients = self._work.clients
        strategy = FedAvg(
            # all clients in every round, as in the other workers, and no evaluation
            fraction_train=1.0,
            fraction_evaluate=0.0,
            min_train_nodes=clients,
            min_available_nodes=clients,
        )
        with suppress(Quit):
            for number in range(1, len(self._work.order) + 1):
                self._pipe.begin()
                self._round(strategy, grid, number)
                self._pipe.end()
            self._pipe.begin()

    def _round(self, strategy: Any, grid: Any, number: int) -> None:
        messages = strategy.configure_train(number, self._arrays, ConfigRecord(), grid)
        replies = list(grid.send_and_receive(messages))
        # the strategy would leave failed clients out, and the round would be of less work
        failed = [reply for reply in replies if reply.has_error()]
        if failed or len(replies) != self._work.clients:
            reason: Any = "no reply"
            if failed:
                reason = failed[0].error
            raise RuntimeError(f"{len(failed)} of {len(replies)} clients failed: {reason}")
        arrays, _ = strategy.aggregate_train(number, replies)
        self._arrays = arrays


def main(arguments: Options) -> None:
    """Run one simulation with as many actors as cores, one thread each."""
    os.environ[EXPORT] = arguments.export
    os.environ[DEVICE] = arguments.device
    work = load(arguments.export)
    server = ServerApp()
    actors = processes(arguments.device)
    server.main()(Server(work).main)
    folder = tempfile.mkdtemp(prefix="ray")
    ray = {
        "num_cpus": actors,
        "include_dashboard": False,
        # bytes: 512 MiB
        "object_store_memory": 1 << 29,
        "_temp_dir": folder,
    }
    share: float = 0
    if arguments.device == "cuda":
        share = 1 / actors
    # of one actor; a GPU is divided equally among them
    resources = {"num_cpus": 1, "num_gpus": share}
    backend = {"init_args": ray, "client_resources": resources}
    run_simulation(server, app, work.clients, backend_config=backend)


if __name__ == "__main__":
    main(options())

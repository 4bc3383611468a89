"""Flower's simulation: its FedAvg strategy, taken round by round as `Strategy.start` does, on ray
actors of one core each.

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
        self._work, self._net = work, build(work)
        self._arrays = ArrayRecord(self._net.state_dict())
        self._pipe = Talk(self.weights, partial(accuracy, work))

    def weights(self) -> Weights:
        """The global model."""
        self._net.load_state_dict(self._arrays.to_torch_state_dict())
        return np.asarray(flat(self._net).numpy(), dtype=np.float32)

    def main(self, grid: Grid, context: Context) -> None:
        """Rounds until the driver quits."""
        everyone = self._work.clients
        strategy = FedAvg(
            fraction_train=1.0,
            fraction_evaluate=0.0,
            min_train_nodes=everyone,
            min_available_nodes=everyone,
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
        failed = [reply for reply in replies if reply.has_error()]
        if failed or len(replies) != self._work.clients:
            raise RuntimeError(
                f"{len(failed)} of {len(replies)} clients failed: "
                f"{failed[0].error if failed else 'no reply'}"
            )
        arrays, _ = strategy.aggregate_train(number, replies)
        self._arrays = arrays


def main(given: Options) -> None:
    """One simulation with as many actors as cores, one thread each."""
    os.environ[EXPORT], os.environ[DEVICE] = given.export, given.device
    work = load(given.export)
    server, actors = ServerApp(), processes(given.device)
    server.main()(Server(work).main)
    folder = tempfile.mkdtemp(prefix="ray")
    ray = {
        "num_cpus": actors,
        "include_dashboard": False,
        "object_store_memory": 1 << 29,
        "_temp_dir": folder,
    }
    share = 1 / actors if given.device == "cuda" else 0
    backend = {"init_args": ray, "client_resources": {"num_cpus": 1, "num_gpus": share}}
    run_simulation(server, app, work.clients, backend_config=backend)


if __name__ == "__main__":
    main(options())

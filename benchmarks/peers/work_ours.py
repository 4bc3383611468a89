"""Train by this project's `FedAvg.fit`, held before each round until the driver asks for it.

Only the observer's evaluation is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster import Federation
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols import FedAvg, Settings
from securecluster.protocols.common.averages.averaging import AveragingState
from securecluster.protocols.common.observer import Observer
from securecluster.runtime.run import Line, Run
from securecluster.runtime.server_channel import ServerChannel
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

from .net import accuracy, settle
from .work import NAMES, Options, Quit, Talk, Weights, Work, load, options


class Ordered(LocalTrainer):
    """Clients that take their mini-batches in the exported order, as in every worker."""

    work: Work

    def batches(self, client: int, plan: LocalTraining, step: int) -> Iterator[NDArray[np.int64]]:
        """Yield the rows of a client's mini-batches in the exported order."""
        # calls are numbered from 1
        exported = self.work.order[step - 1, self.ids[client]]
        order = exported + self._offsets[client]
        for first in range(0, len(order), plan.batch_size):
            yield order[first : first + plan.batch_size]

    def _drawn(self, clients: Sequence[int], plan: LocalTraining, step: int) -> Any:
        """Return the mini-batches of some clients in the exported order."""
        # earlier versions, which a worker may train by, do not have it
        from securecluster.training.batches import Drawn

        return Drawn.of([list(self.batches(client, plan, step)) for client in clients])


class DriversObserver(Observer):
    """The observer evaluates nothing: the driver tests on its own."""

    def evaluate(self, client: Any, state: Any) -> NDArray[np.float64]:
        """Evaluate nothing; store the client and the state that contain the global model."""
        self.method.looked = (client, state)
        return np.empty(0)


class Stepwise(FedAvg):
    """FedAvg whose rounds wait for the driver."""

    work: Work
    pipe: Talk
    # the clients' end and the server's state, as the observer last met them
    looked: tuple[Any, Any] | None = None

    def make_client(self, cohort: Any, pipeline: Pipeline, config: Mapping[str, Any]) -> Any:
        """Return FedAvg's clients, their batches in the exported order."""
        start = cohort.start.cpu().numpy()
        # bit for bit: both follow from the exporter's seed
        if not np.array_equal(start, self.work.start):
            raise RuntimeError("the exported initial weights are not the ones this project draws")
        cohort.__class__ = Ordered
        cohort.work = self.work
        return super().make_client(cohort, pipeline, config)

    def run_server(self, net: ServerChannel, run: Run) -> AveragingState:
        """Run FedAvg's server once the driver asks for the first round."""
        self.pipe.begin()
        return super().run_server(net, run)

    def weights(self) -> Weights:
        """Return the global model (d,), as every client will have it."""
        if self.looked is None:
            return self.work.start
        models = self.observer.models_after_round(*self.looked)
        # FedAvg has one global model, so that any client's will do
        values = models.select([0]).values[0]
        return np.asarray(values.cpu().numpy(), dtype=np.float32)

    def next(self, line: Line) -> None:
        """End a round, checkpoint and all, and wait for the driver."""
        self.pipe.end()
        self.pipe.begin()

    @property
    def observer(self) -> DriversObserver:
        """Return what the experimenter computes outside the protocol."""
        return DriversObserver(self)


def federation_of(work: Work) -> Federation:
    """Return the same clients; nothing is held out, since the driver tests on its own."""
    clients = {}
    for i in range(work.clients):
        images = work.images(i)
        clients[str(i)] = (images, work.y[i])
    shape = work.x.shape[2:]
    no_images = np.empty((0, *shape), np.float32)
    no_labels = np.empty(0, np.int64)
    no_tests = dict.fromkeys(clients, (no_images, no_labels))
    return Federation.from_arrays(clients, test=no_tests, seed=0)


def main(arguments: Options, mask: str = "none") -> None:
    """Train rounds until the driver quits.

    Args:
        arguments: the worker's command line.
        mask: name of the mask on updates.
    """
    work = load(arguments.export)
    protocol = Stepwise(
        rounds=len(work.order),
        model=NAMES[work.model],
        lr=work.lr,
        epochs=1,
        batch_size=work.batch,
        mask=mask,
    )
    federation = federation_of(work)
    protocol.work = work
    settled = settle(arguments.device)
    # of the class: the server's half runs on a new object
    Stepwise.pipe = Talk(protocol.weights, partial(accuracy, work), settled)
    # no transcript, as no peer writes one
    settings = Settings(arguments.device, arguments.threads, transcript="none", keys_from_seed=True)
    with suppress(Quit):
        protocol.fit(federation, settings, report=protocol.next)


if __name__ == "__main__":
    main(options())

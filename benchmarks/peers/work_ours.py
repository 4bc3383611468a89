"""This project: the real `FedAvg.fit`, held before each round until the driver asks for it. Only
the observer's evaluation is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster import Federation
from securecluster.protocols import FedAvg, Settings
from securecluster.protocols.common.averaging import AveragingState
from securecluster.runtime.run import Line, Run
from securecluster.runtime.server_channel import ServerChannel
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

from .net import accuracy, settle
from .work import NAMES, Options, Quit, Talk, Weights, Work, load, options


class Ordered(LocalTrainer):
    """A cohort that takes its mini-batches in the exported order, so that every worker does the
    same steps.
    """

    work: Work

    def _batches(self, who: int, plan: LocalTraining, step: int) -> Iterator[NDArray[np.int64]]:
        order = self.work.order[step - 1, self.ids[who]] + self._offsets[who]
        for first in range(0, len(order), plan.batch_size):
            yield order[first : first + plan.batch_size]


class Stepwise(FedAvg):
    """FedAvg whose rounds wait for the driver."""

    work: Work
    pipe: Talk
    # the clients' end and the server's state, as the observer last met them
    looked: tuple[Any, Any] | None = None

    def build_client(
        self, federation: Federation, settings: Settings, *rest: Any, **named: Any
    ) -> Any:
        """FedAvg's clients, their batches in the exported order."""
        endpoint: Any = super().build_client(federation, settings, *rest, **named)
        cohort = endpoint.client.cohort
        if not np.array_equal(cohort.start.cpu().numpy(), self.work.start):
            raise RuntimeError("the exported initial weights are not the ones this project draws")
        cohort.__class__, cohort.work = Ordered, self.work
        return endpoint

    def run_server(self, net: ServerChannel, run: Run) -> AveragingState:
        """As FedAvg, once the driver asks for the first round."""
        self.pipe.begin()
        return super().run_server(net, run)

    def evaluate(self, client: Any, state: Any) -> NDArray[np.float64]:
        """Nothing is evaluated; only where the global model is to be found is kept."""
        self.looked = (client, state)
        return np.empty(0)

    def weights(self) -> Weights:
        """The global model, as every client will have it."""
        if self.looked is None:
            return self.work.start
        return np.asarray(
            self.models_after_round(*self.looked).select([0]).values[0].cpu().numpy(),
            dtype=np.float32,
        )

    def next(self, line: Line) -> None:
        """The round is over, checkpoint and all."""
        self.pipe.end()
        self.pipe.begin()


def federation_of(work: Work) -> Federation:
    """The same clients; nothing held out, since the driver tests on its own."""
    clients = {str(i): (work.images(i), work.y[i]) for i in range(work.clients)}
    nothing = (np.empty((0, *work.x.shape[2:]), np.float32), np.empty(0, np.int64))
    return Federation.from_arrays(clients, test=dict.fromkeys(clients, nothing), seed=0)


def main(given: Options) -> None:
    """Rounds until the driver quits."""
    work = load(given.export)
    protocol = Stepwise(
        rounds=len(work.order), model=NAMES[work.model], lr=work.lr, epochs=1, batch_size=work.batch
    )
    federation, protocol.work = federation_of(work), work
    protocol.pipe = Talk(protocol.weights, partial(accuracy, work), settle(given.device))
    with suppress(Quit):
        protocol.fit(
            federation,
            Settings(given.device, given.threads, transcript="none"),
            report=protocol.next,
        )


if __name__ == "__main__":
    main(options())

"""Guard of a client method's call: what it reads and draws is what it declares.

A declaration, and the price of a field that a protocol states, are words. Reads of data and draws
of noise are deeds, and each leaves a trace: the trainer notes reads and trainings, and a draw of
noise writes a receipt. A reply whose traces do not bear out its declaration stays at its client.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from securecluster.errors import PolicyError
from securecluster.messaging.messages import Rows
from securecluster.privacy.dp.noise_streams import NoiseStreams, Receipt
from securecluster.runtime.endpoint import ReleasePolicy
from securecluster.runtime.release_accounting import FieldNoise, ReleaseAccounting
from securecluster.training.config import LocalTraining
from securecluster.training.data_access import DataAccess, Reads

ROUNDED = 1 - 1e-9  # multipliers are computed in more than one way


@dataclass
class Traces:
    """What one call of a client method left behind.

    Args:
        method: its name, for messages.
        release: its declaration.
        reads: reads of data, and trainings.
        receipts: of the draws of noise.
    """

    method: str
    release: ReleasePolicy
    reads: Reads
    receipts: Sequence[Receipt]


class ReleaseGuard:
    """Guard of the calls of one endpoint.

    Args:
        access: of the clients' trainer.
        draws: the clients' streams of noise.
        costs: accounting of the run's noise, whose prices are to be borne out.
        samples: number of samples of each client by its number, where these are public; empty
            where they are not.
    """

    def __init__(
        self,
        access: DataAccess,
        draws: NoiseStreams,
        costs: ReleaseAccounting,
        samples: Mapping[int, int],
    ) -> None:
        self._access = access
        self._draws = draws
        self._samples = samples
        self._prices: Mapping[str, FieldNoise] = costs.fields
        self._plans: Mapping[str, LocalTraining] = costs.training

    @contextmanager
    def during(self, method: str, release: ReleasePolicy, has_fields: bool) -> Iterator[Traces]:
        """Allow a method what it declares, and yield its traces.

        Args:
            method: its name, for messages.
            release: its declaration.
            has_fields: whether its replies have content. What has none may be computed of anything.
        """
        reports_data = release.private and not release.derived
        may_read = reports_data or not has_fields
        with (
            self._access.during(method, may_read, bool(release.trains)) as reads,
            self._draws.receipts() as receipts,
        ):
            yield Traces(method, release, reads, receipts)

    def check(self, traces: Traces, reply: Any, clients: Sequence[int]) -> None:
        """Check a reply against the traces of its call.

        Args:
            traces: of the call.
            reply: before the pipeline.
            clients: whose replies it has.

        Raises:
            PolicyError: a training of another plan than is priced; a field without the noise that
                it is priced by; or one that is priced as following from earlier releases, and does
                not.
        """
        self._check_plans(traces)
        release = traces.release
        if not release.private or release.derived:
            return
        for name, value in vars(reply).items():
            price = self._prices.get(name)
            if value is None or price is None:
                continue
            if math.isinf(price.multiplier):
                if not self._is_public(value, clients):
                    self._check_follows(traces, name)
            else:
                _check_noise(traces, name, price.multiplier, clients)

    def _check_plans(self, traces: Traces) -> None:
        """Raise PolicyError for a training without the noise that the run prices it by."""
        priced = self._plans.get(traces.release.trains)
        if priced is None:
            return
        for plan in traces.reads.plans:
            same_noise = (plan.clip, plan.noise) == (priced.clip, priced.noise)
            same_steps = (plan.batch_size, plan.epochs) == (priced.batch_size, priced.epochs)
            if not (same_noise and same_steps):
                raise PolicyError(
                    f'{traces.method} trains by another plan than trains="{traces.release.trains}" '
                    "is priced by: train with the plan of the run (self.training)"
                )

    def _is_public(self, value: Any, clients: Sequence[int]) -> bool:
        """Return whether a field holds each client's number of samples, where that is public."""
        if not self._samples or not isinstance(value, Rows):
            return False
        samples = [float(self._samples[client]) for client in clients]
        return bool(value.values.double().flatten().tolist() == samples)

    def _check_follows(self, traces: Traces, name: str) -> None:
        """Raise PolicyError for a field that costs nothing and is computed of clients' data."""
        read = sorted(traces.reads.data)
        if traces.reads.plans and not self._plans:
            read.append("train")
        # with noise in the same call, the field may be part of what has it
        if read and not traces.receipts:
            raise PolicyError(
                f"{name} of {traces.method} is priced as following from earlier releases, and the "
                f"method reads cohort.{read[0]}: give it noise of its own, or leave its price out, "
                "and ε is infinite"
            )


def _check_noise(traces: Traces, name: str, multiplier: float, clients: Sequence[int]) -> None:
    """Raise PolicyError for a field without the noise that it is priced by.

    Args:
        traces: of the call.
        name: of the field.
        multiplier: that the field is priced by.
        clients: whose replies it is of.
    """
    drawn: dict[int, float] = {}
    for receipt in traces.receipts:
        least = drawn.get(receipt.client, math.inf)
        drawn[receipt.client] = min(least, receipt.multiplier)
    for client in clients:
        if client not in drawn:
            raise PolicyError(
                f"{name} of {traces.method} is priced by noise of multiplier {multiplier:.4g}, and "
                f"client {client} drew none from its own streams in this call: draw it there, or "
                "leave the price out, and ε is infinite"
            )
        if drawn[client] < multiplier * ROUNDED:
            raise PolicyError(
                f"{name} of {traces.method} is priced by noise of multiplier {multiplier:.4g}, and "
                f"client {client} drew noise of multiplier {drawn[client]:.4g}: draw as much as is "
                "priced"
            )

"""Guard of a client method's call: what it reads is what it declares, and its receipts are its
deeds.

The trainer notes reads of data and trainings, and releases write receipts of their noise. A field
without a receipt is exact, unless it follows from private local training: then the call read no
data but by such training, and its client's state follows from no other data either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from securecluster.core.lazy_torch import torch
from securecluster.errors import PolicyError
from securecluster.messaging.receipts import FOLLOWS, TRAINING, Receipt, Receipts
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import KEPT, ReleasePolicy
from securecluster.training.config import LocalTraining
from securecluster.training.data_access import DataAccess, Reads


@dataclass
class Traces:
    """What one call of a client method left behind.

    Args:
        method: its name, for messages.
        release: its declaration.
        reads: reads of data, and trainings.
    """

    method: str
    release: ReleasePolicy
    reads: Reads


class ReleaseGuard:
    """Guard of the calls of one endpoint.

    Args:
        access: of the clients' trainer.
        samples: numbers of samples of each client by its number, where these are public; empty
            where they are not.
        private_training: whether the run's local training is DP-SGD.
        clients: number of clients at the endpoint.
    """

    def __init__(
        self,
        access: DataAccess,
        samples: Mapping[int, frozenset[float]],
        private_training: bool,
        clients: int,
    ) -> None:
        self.access = access
        self.samples = samples
        self._private_training = private_training
        # by position: whether the client's state may follow from data beside private training
        self._informed = torch.zeros(clients, dtype=torch.uint8)

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
        with self.access.during(method, may_read, bool(release.trains)) as reads:
            yield Traces(method, release, reads)

    def receipts(self, traces: Traces, reply: Any, context: CallContext) -> list[Receipts]:
        """Return the receipts of each client's reply.

        Args:
            traces: of the call.
            reply: before the pipeline.
            context: of the call.
        """
        release = traces.release
        plans: dict[int, list[LocalTraining]] = {}
        for plan, positions in traces.reads.trainings:
            for k in positions:
                plans.setdefault(k, []).append(plan)
        of_releases: list[Receipts] = [()] * len(context.ids)
        present: list[str] = []
        if release.private and not release.derived:
            of_releases = context.releases.receipts(reply, context.ids)
            present = [name for name, value in vars(reply).items() if value is not None]
        written = []
        for k, of_client in zip(context.positions, of_releases, strict=True):
            trainings = plans.get(k, [])
            following: tuple[str, ...] = ()
            if self._follows_training(traces, k, trainings):
                paid = {name for receipt in of_client for name in receipt.fields}
                following = tuple(name for name in present if name not in paid)
            of_trainings = _training_receipts(release, trainings, following)
            written.append((*of_trainings, *of_client))
        self._note(traces, context.positions, plans)
        return written

    def _follows_training(self, traces: Traces, k: int, trainings: Sequence[LocalTraining]) -> bool:
        """Return True if what a client replies follows from private training and releases alone."""
        release = traces.release
        if not self._private_training or not release.private or release.derived:
            return False
        if traces.reads.data or not all(plan.noise > 0 for plan in trainings):
            return False
        return bool(trainings) or not self._informed[k]

    def _note(
        self, traces: Traces, positions: Sequence[int], plans: Mapping[int, Sequence[LocalTraining]]
    ) -> None:
        """Note whose state may now follow from data, beside private training."""
        for k in positions:
            exact = any(not plan.noise for plan in plans.get(k, ()))
            if traces.reads.data or exact:
                self._informed[k] = 1

    def memory(self) -> torch.Tensor:
        """Return for each client whether its state may follow from data, uint8."""
        return self._informed.clone()

    def recall(self, informed: torch.Tensor) -> None:
        """Restore what `memory` returned.

        Args:
            informed: by position.
        """
        self._informed = informed.clone()


def _training_receipts(
    release: ReleasePolicy, trainings: Sequence[LocalTraining], following: tuple[str, ...]
) -> list[Receipt]:
    """Return the receipts of one client's trainings in a call.

    Fields that follow from earlier private trainings have one without a training of its own.

    Args:
        release: declaration of the called method.
        trainings: of the client.
        following: fields of the reply that follow from them, or from earlier ones.
    """
    private = [plan for plan in trainings if plan.noise > 0]
    if release.trains == KEPT:
        private = []  # repeated to the bit, or of a model that never leaves
    receipts = []
    for plan in private:
        if plan.steps is not None:
            raise PolicyError(
                "DP-SGD is priced by its epochs, and a training has a fixed number of steps: give "
                "epochs"
            )
        receipt = Receipt(
            TRAINING,
            multiplier=float(plan.noise),
            batch=plan.batch_size,
            epochs=plan.epochs,
        )
        receipts.append(receipt)
    if following and receipts:
        receipts[0] = replace(receipts[0], fields=following)
    elif following:
        receipts.append(Receipt(FOLLOWS, following))
    return receipts

"""Guard of a client method's call: what it reads is what it declares, and its receipts are its
deeds.

The trainer notes reads of data and trainings, and releases write receipts of their noise. A field
without a receipt is exact, unless it follows from private local training: then the call read no
data but by such training, and earlier calls of its client did not either, unless this one trains.
In that case what was read earlier, and steers the training, is not noticed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from securecluster.errors import PolicyError
from securecluster.messaging.receipts import FOLLOWS, TRAINING, Receipt, Receipts
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.release_policy import KEPT, ReleasePolicy
from securecluster.training.data_access import DataAccess, Reads, Training


@dataclass
class Traces:
    """Traces that one call of a client method left behind.

    Args:
        method: its name, for messages.
        release: its declaration.
        reads: reads of data, and trainings.
    """

    method: str
    release: ReleasePolicy
    reads: Reads


@dataclass(frozen=True)
class _Outcome:
    """Outcome of one call for one client.

    Args:
        receipts: of its reply.
        informed: whether its state may follow from data beside private training.
        trained: step of its last private training that had a receipt.
    """

    receipts: Receipts
    informed: bool
    trained: int


class Remembering(Protocol):
    """Clients that remember, by position, what their guard asks for."""

    guard_informed: Any  # whether their state may follow from data beside private training
    guard_trained: Any  # the step of the last private training that had a receipt


class ReleaseGuard:
    """Guard of the calls of one endpoint.

    Args:
        client: of the endpoint.
        access: of the clients' trainer.
        samples: numbers of samples of each client by its number, where these are public; empty
            where they are not.
        private_training: whether the run's local training is DP-SGD.
    """

    def __init__(
        self,
        client: Remembering,
        access: DataAccess,
        samples: Mapping[int, frozenset[float]],
        private_training: bool,
    ) -> None:
        self.access = access
        self.samples = samples
        self._client = client
        self._private_training = private_training

    @contextmanager
    def during(
        self, method: str, release: ReleasePolicy, has_fields: bool, context: CallContext
    ) -> Iterator[Traces]:
        """Allow a method what it declares, and yield its traces.

        Args:
            method: its name, for messages.
            release: its declaration.
            has_fields: whether its replies have content. What has none may be computed of anything.
            context: of the call.
        """
        reports_data = release.private and not release.derived
        may_read = reports_data or not has_fields
        may_train = bool(release.trains)
        called = frozenset(context.positions)
        with self.access.during(method, may_read, may_train, called, context.round) as reads:
            yield Traces(method, release, reads)

    def receipts(self, traces: Traces, reply: Any, context: CallContext) -> list[Receipts]:
        """Return the receipts of each client's reply.

        Args:
            traces: of the call.
            reply: before the pipeline.
            context: of the call.
        """
        release = traces.release
        trainings_of: dict[int, list[Training]] = {}
        for training in traces.reads.trainings:
            for k in training.clients:
                trainings_of.setdefault(k, []).append(training)
        of_releases: list[Receipts] = [()] * len(context.ids)
        present: list[str] = []
        if release.private and not release.derived:
            of_releases = context.releases.receipts(reply, context.ids)
            present = [name for name, value in vars(reply).items() if value is not None]
        informed = self._client.guard_informed[context.positions].tolist()
        trained = self._client.guard_trained[context.positions].tolist()
        written = []
        # clients that did the same leave the same behind: what they did -> their outcome
        outcomes: dict[Any, _Outcome] = {}
        for n, k in enumerate(context.positions):
            trainings = trainings_of.get(k, [])
            deeds = (tuple(map(id, trainings)), of_releases[n], informed[n], trained[n])
            if deeds not in outcomes:
                outcomes[deeds] = self._outcome(traces, trainings, *deeds[1:], present)
            outcome = outcomes[deeds]
            written.append(outcome.receipts)
            informed[n] = outcome.informed
            trained[n] = outcome.trained
        self._client.guard_informed[context.positions] = informed
        self._client.guard_trained[context.positions] = trained
        return written

    def _outcome(
        self,
        traces: Traces,
        trainings: Sequence[Training],
        of_releases: Receipts,
        informed: bool,
        trained: int,
        present: Sequence[str],
    ) -> _Outcome:
        """Return what a call leaves behind of one client.

        Args:
            traces: of the call.
            trainings: of the client in the call.
            of_releases: receipts of the noise in its reply.
            informed: whether its state may follow from data beside private training.
            trained: step of its last private training that had a receipt.
            present: fields of its reply that tell something new of its data.
        """
        release = traces.release
        following: tuple[str, ...] = ()
        if self._follows_training(traces, trainings, informed):
            paid = {name for receipt in of_releases for name in receipt.fields}
            following = tuple(name for name in present if name not in paid)
        due = _due(release, trainings, trained)
        of_trainings = _training_receipts(due, following)
        # a model that is kept without a receipt may leave later
        unpaid = len(due) < len(trainings) and release.trains == KEPT and not present
        exact = any(training.plan.noise == 0 for training in trainings)
        return _Outcome(
            receipts=(*of_trainings, *of_releases),
            informed=informed or bool(traces.reads.data) or exact or unpaid,
            trained=max([trained, *(training.step for training in due)]),
        )

    def _follows_training(
        self, traces: Traces, trainings: Sequence[Training], informed: bool
    ) -> bool:
        """Return True if what a client replies follows from private training and releases alone.

        Args:
            traces: of the call.
            trainings: of the client in the call.
            informed: whether its state may follow from data beside private training.
        """
        release = traces.release
        if not self._private_training or not release.private or release.derived:
            return False
        if traces.reads.data or not all(training.plan.noise > 0 for training in trainings):
            return False
        return bool(trainings) or not informed


def _due(release: ReleasePolicy, trainings: Sequence[Training], paid: int) -> list[Training]:
    """Return the private trainings of a client in a call that have a receipt.

    Args:
        release: declaration of the called method.
        trainings: of the client.
        paid: step of its last training that had one: repeated, it is the same to the bit.
    """
    private = [training for training in trainings if training.plan.noise > 0]
    if release.trains != KEPT:
        return private
    if not release.private:  # of a model that stays at its client
        return []
    return [training for training in private if training.step != paid]


def _training_receipts(trainings: Sequence[Training], following: tuple[str, ...]) -> list[Receipt]:
    """Return the receipts of one client's trainings in a call.

    Fields that follow from earlier private trainings have one without a training of its own.

    Args:
        trainings: that have a receipt.
        following: fields of the reply that follow from them, or from earlier ones.

    Raises:
        PolicyError: a training that has no price.
    """
    receipts = []
    for plan, _, _ in trainings:
        if plan.steps is not None:
            raise PolicyError(
                "DP-SGD is priced by its epochs, and a training has a fixed number of steps: give "
                "epochs"
            )
        receipt = Receipt(
            TRAINING, multiplier=float(plan.noise), batch=plan.batch_size, epochs=plan.epochs
        )
        receipts.append(receipt)
    if following and receipts:
        receipts[0] = replace(receipts[0], fields=following)
    elif following:
        receipts.append(Receipt(FOLLOWS, following))
    return receipts

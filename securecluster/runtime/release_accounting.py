"""Accounting for the noise in clients' replies: their privacy cost by receipts, the noise that a
trusted server adds when it reads them, and the bias correction of squared norms.

Nobody declares a price. Each field of each reply is an event: priced by its receipts, or by the
noise of a trusted server or of a secure sum; free if it is derived from earlier releases; and exact
otherwise. A release is charged once, to the first field that follows from it. Training under DP-SGD
is an event of its own, also where nothing leaves: it counts as soon as anything of that client
leaves.

A trusted server's noise is added here alone (`read`), between the transport and the verbs, so no
loop and no checkpoint holds a reply without it; only the transcript does, which an auditor keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from securecluster.messaging.messages import Rows
from securecluster.messaging.receipts import GAUSSIAN, TRAINING, Receipt, Receipts
from securecluster.privacy.dp.gaussian_mechanism import REPLACE, TrustedCurator
from securecluster.privacy.dp.ledger import Event, Mechanism
from securecluster.privacy.pipeline import Pipeline
from securecluster.runtime.release_policy import KEPT, ReleasePolicy
from securecluster.training.config import LocalTraining

if TYPE_CHECKING:
    from securecluster.privacy.dp.skellam_mechanism import SkellamMechanism

A = TypeVar("A")


@dataclass(frozen=True)
class ReleaseAccounting:
    """Accounting of a run's releases: receipts of clients, and noise that servers and sums add.

    Args:
        pipeline: stages that clients' replies pass through.
        training: DP-SGD plan by kind of training (`ReleasePolicy.trains`); empty without any.
        curator: the noise of a trusted server, or None.
        trained: by kind of training, the variance that DP-SGD's noise adds to each coordinate of a
            client's update, on average over clients.
        sum_noise: noise of which clients add shares in secure sums, or None.
        curators: the noise of a trusted server by field, where it is not `curator`'s.
        sum_noises: noise in shares by field, where it is not `sum_noise`.
    """

    pipeline: Pipeline
    training: Mapping[str, LocalTraining] = field(default_factory=dict)
    curator: TrustedCurator | None = None
    trained: Mapping[str, float] = field(default_factory=dict)
    sum_noise: SkellamMechanism | None = None
    curators: Mapping[str, TrustedCurator] = field(default_factory=dict)
    sum_noises: Mapping[str, SkellamMechanism] = field(default_factory=dict)

    def noise(self, name: str, d: int, trains: str = "usual", round: int = 0) -> float:
        """Return the expected squared norm of the noise in one row of a field, whoever added it.

        Args:
            name: name of the field.
            d: number of coordinates of the update that the row is made of.
            trains: kind of training behind the row.
            round: number of the round, which learning rates may depend on.
        """
        pipeline = self.pipeline.of(name)
        curator = self._curator(name)
        curator_noise = 0.0
        if curator:
            curator_noise = curator.squared_noise(pipeline.width(d))
        training_noise = self.trained.get(trains, 0.0) * d
        plan = self.training.get(trains)
        if plan is not None and plan.schedule is not None:
            training_noise *= plan.schedule.factor(round) ** 2
        return pipeline.noise(d) + curator_noise + training_noise

    def read(
        self, release: ReleasePolicy, reply: A, step: int, counts: Sequence[int] | None = None
    ) -> A:
        """Return a reply as the protocol sees it: decoded, and with a trusted server's noise.

        Args:
            release: declaration of the called method.
            reply: the replies as they arrived; None if nobody replied.
            step: number of the call.
            counts: number of clients in each row, if the rows are sums; a sum over nobody stays
                zero.
        """
        if reply is None:
            return reply
        changes: dict[str, Rows] = {}
        for name in release.through:
            if self._server_cannot_read(release, name):  # it only relays the row
                continue
            received = getattr(reply, name)
            rows = received.values
            if not release.derived:  # made of rows that are decoded and noised already
                rows = self.pipeline.of(name).decode(rows)
                curator = self._curator(name)
                if curator:
                    rows = curator.add(rows, step, name, counts)
            if rows is not received.table:
                changes[name] = Rows(rows)
        if not changes:
            return reply
        return replace(reply, **changes)  # type: ignore[type-var]

    def receipts_or_assumed(self, release: ReleasePolicy, receipts: Receipts | None) -> Receipts:
        """Return a client's receipts, or those of a training that it may have done in silence.

        A client whose reply was lost may have trained before that. Where it only trains, it does so
        once for a request that arrives twice, and has a receipt in its first reply alone.

        Args:
            release: declaration of the called method.
            receipts: of the client; None where its reply was lost.
        """
        if receipts is None:
            return self._assumed(release)
        only_trains = not release.private and release.trains != KEPT
        if only_trains and all(receipt.mechanism != TRAINING for receipt in receipts):
            return (*receipts, *self._assumed(release))
        return receipts

    def _assumed(self, release: ReleasePolicy) -> Receipts:
        """Return the receipts of a client that has trained as the called method does."""
        plan = self.training.get(release.trains)
        if plan is None:
            return ()
        receipt = Receipt(
            TRAINING, multiplier=plan.noise, batch=plan.batch_size, epochs=plan.epochs
        )
        return (receipt,)

    def repeatable(self, release: ReleasePolicy, reply: Any, receipts: Receipts) -> bool:
        """Return True if a second reply to the same call, with other bits, would cost again.

        Replies with an exact field cannot, since ε is infinite already; nor can what is made of
        earlier releases.

        Args:
            release: declaration of the called method.
            reply: a reply of the method.
            receipts: of its client.
        """
        if not release.private or release.derived:
            return False
        charges = self._charges(release, reply, receipts)
        if any(charge.mechanism == "exact" for charge in charges):
            return False
        if self.training:
            # Another training may be behind a field that costs nothing itself.
            return True
        return any(charge.mechanism != "free" for charge in charges)

    def per_group(self, release: ReleasePolicy) -> bool:
        """Return True if a trusted server adds noise to a field of this reply.

        Where sums arrive, it adds the noise once per sum.

        Args:
            release: declaration of the called method.
        """
        if release.derived:
            return False
        return any(self._curator(name) for name in release.through)

    def events(
        self,
        release: ReleasePolicy,
        call: Event,
        reply: Any,
        receipts: Sequence[Receipts] = ((),),
        members: int = 1,
        survivors: int = 1,
    ) -> Iterator[Event]:
        """Yield what clients released in one call: the training behind it, then field by field.

        Args:
            release: declaration of the called method.
            call: event with the call, its clients and its reader. Its digests are of each client's
                reply, where a repetition with other bits costs again.
            reply: the reply as the protocol sees it.
            receipts: of each of the call's clients, which differ in digests at most.
            members: clients that were asked for a row of a sum with noise in shares.
            survivors: those of them whose rows are in the sum.
        """
        for receipt in receipts[0]:
            if receipt.mechanism == TRAINING:
                yield replace(
                    call,
                    mechanism="dp-sgd",
                    noise_multiplier=receipt.multiplier,
                    replace=REPLACE,
                    batch=receipt.batch,
                    epochs=receipt.epochs,
                    # Without a private reply the trained model stays at its client: it costs only
                    # as soon as something that follows from it leaves.
                    kept=not release.private,
                    seen=False,
                )
        if not release.private:
            for name in release.public:
                yield replace(call, fields=(name,), mechanism="public", digests=())
            return
        for charge in self._charges(release, reply, receipts[0]):
            event = self._field_event(release, call, charge)
            if charge.receipt is not None and receipts[0][charge.receipt].once:
                once = tuple(client_receipts[charge.receipt].once for client_receipts in receipts)
                event = replace(event, once=once)
            if charge.mechanism == "skellam":
                d = getattr(reply, charge.field).table[0].numel()
                event = self._sum_event(event, charge.field, d, members, survivors)
            yield event

    def _charges(self, release: ReleasePolicy, reply: Any, receipts: Receipts) -> list[_Charge]:
        """Return what the fields of a reply cost, in their order.

        A field that follows from several releases has a charge for each. Each release is charged
        once: further fields that follow from it are free.

        Args:
            release: declaration of the called method.
            reply: the reply.
            receipts: of its client.
        """
        charges: list[_Charge] = []
        paid: set[int] = set()
        for name in _released_fields(reply):
            if release.derived:  # post-processing of earlier releases costs nothing
                charges.append(_Charge(name, "free", replace=1.0))
                continue
            charge = self._charge_of_sum(release, name)
            if charge is not None:
                charges.append(charge)
                continue
            named = [k for k, receipt in enumerate(receipts) if name in receipt.fields]
            due = [k for k in named if receipts[k].mechanism == GAUSSIAN and k not in paid]
            for k in due:
                receipt = receipts[k]
                charges.append(
                    _Charge(name, "gaussian", receipt.multiplier, receipt.replace, receipt=k)
                )
            if not due:
                charges.append(_Charge(name, "free" if named else "exact"))
            paid.update(due)
        return charges

    def _charge_of_sum(self, release: ReleasePolicy, name: str) -> _Charge | None:
        """Return the charge of a field that a trusted server or a secure sum adds noise to."""
        if name not in release.through:
            return None
        curator = self._curator(name)
        if curator is not None:
            return _Charge(name, "gaussian", curator.multiplier)
        shares = self._sum_noise(name)
        if shares is not None and self.pipeline.of(name).clips:
            return _Charge(name, "skellam", shares.multiplier)
        return None

    def _sum_event(self, event: Event, name: str, d: int, members: int, survivors: int) -> Event:
        """Return the event of a field with the noise of a secure sum.

        Args:
            event: the field's event.
            name: name of the field.
            d: numbers in a row.
            members: clients that were asked for a row.
            survivors: number of clients in the sum.
        """
        noise = self._sum_noise(name)
        assert noise is not None
        plan = noise.plan(d, members)
        released = plan.release(survivors)
        return replace(
            event, sensitivities=(released.norm, released.magnitudes), variance=released.variance
        )

    def _sum_noise(self, name: str) -> SkellamMechanism | None:
        """Return the noise of which clients add shares to a field, if any."""
        return self.sum_noises.get(name, self.sum_noise)

    def _field_event(self, release: ReleasePolicy, call: Event, charge: _Charge) -> Event:
        """Return the event of one field of a reply."""
        digests: tuple[str, ...] = ()
        if charge.mechanism in ("gaussian", "skellam"):
            digests = call.digests
        elif charge.mechanism == "free" and self.training:
            # Another training of the same client may be behind a field that costs nothing itself.
            digests = call.digests
        readable = not self._server_cannot_read(release, charge.field)
        return replace(
            call,
            fields=(charge.field,),
            mechanism=charge.mechanism,
            noise_multiplier=charge.multiplier,
            replace=charge.replace,
            seen=charge.field in release.through and readable,
            digests=digests,
        )

    def _curator(self, name: str) -> TrustedCurator | None:
        """Return the trusted server's noise on a field, if it adds any.

        It adds noise only to rows that clients clip, since its scale follows from the clip norm.
        """
        if not self.pipeline.of(name).clips:
            return None
        return self.curators.get(name, self.curator)

    def _server_cannot_read(self, release: ReleasePolicy, name: str) -> bool:
        """Return True if a field is sealed for other clients."""
        return self.pipeline.seal is not None and name in release.sealed


@dataclass(frozen=True)
class _Charge:
    """Cost of one field of a reply, or of one of the releases that it follows from.

    Args:
        receipt: position of the receipt that it is by; None where it is by none.
    """

    field: str
    mechanism: Mechanism
    multiplier: float | None = None
    replace: float = REPLACE
    receipt: int | None = None


def without_digests(receipts: Receipts) -> Receipts:
    """Return receipts as they are alike for clients whose releases cost the same.

    Args:
        receipts: of one client.
    """
    if not any(receipt.once for receipt in receipts):
        return receipts
    return tuple(replace(receipt, once="once" if receipt.once else "") for receipt in receipts)


def _released_fields(reply: Any) -> list[str]:
    """Return the names of a reply's fields that are not absent, each of which is released.

    A reply may hold fields in another form, such as ciphertexts: then these are named by its class.
    """
    hidden: tuple[str, ...] | None = getattr(type(reply), "__hidden_fields__", None)
    if hidden is not None:
        return list(hidden)
    return [name for name, value in vars(reply).items() if value is not None]

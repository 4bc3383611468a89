"""Accounting for the noise in clients' replies: their privacy cost, the noise that a trusted server
adds when it reads them, and the bias correction of squared norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from securecluster.messaging.messages import Rows
from securecluster.privacy.dp.gaussian_mechanism import REPLACE, TrustedCurator
from securecluster.privacy.dp.ledger import Event, Mechanism
from securecluster.privacy.dp.skellam_mechanism import SkellamMechanism
from securecluster.privacy.pipeline import Pipeline
from securecluster.runtime.endpoint import ReleasePolicy
from securecluster.training.config import LocalTraining

A = TypeVar("A")


@dataclass(frozen=True)
class FieldNoise:
    """Noise of one field of clients' replies that the client's method adds, or inherits.

    Args:
        multiplier: standard deviation over the sensitivity to blanking the unit of privacy, which
            then contributes zeros; infinite for a field that follows from other releases, or that
            is public.
        replacement: sensitivity to replacing the unit over that to blanking it.
    """

    multiplier: float
    replacement: float = REPLACE


@dataclass(frozen=True)
class ReleaseAccounting:
    """Noise of a run's replies, by field.

    Args:
        pipeline: stages that clients' replies pass through.
        fields: by field of a reply, the noise that the client's method adds itself. Fields that
            are neither here nor noised by the pipeline are exact.
        training: DP-SGD plan by kind of training (`ReleasePolicy.trains`); empty without any.
        curator: the noise of a trusted server, or None.
        trained: by kind of training, the variance that DP-SGD's noise adds to each coordinate of a
            client's update, on average over clients.
        sum_noise: noise of which clients add shares in secure sums, or None.
        curators: the noise of a trusted server by field, where it is not `curator`'s.
        sum_noises: noise in shares by field, where it is not `sum_noise`.
    """

    pipeline: Pipeline
    fields: Mapping[str, FieldNoise] = field(default_factory=dict)
    training: Mapping[str, LocalTraining] = field(default_factory=dict)
    curator: TrustedCurator | None = None
    trained: Mapping[str, float] = field(default_factory=dict)
    sum_noise: SkellamMechanism | None = None
    curators: Mapping[str, TrustedCurator] = field(default_factory=dict)
    sum_noises: Mapping[str, SkellamMechanism] = field(default_factory=dict)

    def noise(self, name: str, d: int, trains: str = "usual") -> float:
        """Return the expected squared norm of the noise in one row of a field, whoever added it.

        Args:
            name: name of the field.
            d: number of coordinates of the update that the row is made of.
            trains: kind of training behind the row.
        """
        pipeline = self.pipeline.of(name)
        curator = self._curator(name)
        curator_noise = 0.0
        if curator:
            curator_noise = curator.squared_noise(pipeline.width(d))
        training_noise = self.trained.get(trains, 0.0) * d
        return pipeline.noise(d) + curator_noise + training_noise

    def read(
        self,
        release: ReleasePolicy,
        reply: A,
        step: int,
        counts: Sequence[int] | None = None,
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

    def repeatable(self, release: ReleasePolicy, reply: Any) -> bool:
        """Return True if a second reply to the same call, with other bits, would cost again.

        Replies with an exact field cannot, since ε is infinite already; nor can what is made of
        earlier releases.

        Args:
            release: declaration of the called method.
            reply: a reply of the method.
        """
        if not release.private or release.derived:
            return False
        multipliers = []
        for name in _released_fields(reply):
            multiplier, _ = self._cost(release, name)
            if multiplier is None:
                return False
            multipliers.append(multiplier)
        if self.training:
            # Another training may be behind a field that costs nothing itself.
            return True
        return any(not math.isinf(multiplier) for multiplier in multipliers)

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
        members: int = 1,
        survivors: int | None = None,
    ) -> Iterator[Event]:
        """Yield what clients released in one call: the training behind it, then field by field.

        Args:
            release: declaration of the called method.
            call: event with the call, its clients and its reader. Its digests are of each client's
                reply, where a repetition with other bits costs again.
            reply: the reply as the protocol sees it.
            members: clients that were asked for a row of the sum, where the call's clients are the
                survivors of one.
            survivors: number of clients in the sum, where it is not that of the call's clients.
        """
        plan = self.training.get(release.trains)
        if plan is not None:
            yield replace(
                call,
                mechanism="dp-sgd",
                noise_multiplier=plan.noise,
                replace=REPLACE,
                batch=plan.batch_size,
                epochs=plan.epochs,
                # Without a private reply the trained model stays at its client: it costs only
                # as soon as something that follows from it leaves.
                kept=not release.private,
                seen=False,
            )
        if not release.private:
            for name in release.public:
                yield replace(call, fields=(name,), mechanism="public", digests=())
            return
        for name in _released_fields(reply):
            event = self._field_event(release, call, name)
            if self._noised_in_sums(release, name):
                d = getattr(reply, name).table[0].numel()
                event = self._sum_event(event, name, d, members, survivors or call.clients)
            yield event

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
            event,
            sensitivities=(released.norm, released.magnitudes),
            variance=released.variance,
        )

    def _noised_in_sums(self, release: ReleasePolicy, name: str) -> bool:
        """Return True if clients add shares of noise to a field in secure sums."""
        if self.sum_noise is None or release.derived or name not in release.through:
            return False
        return self.pipeline.of(name).clips and name not in self.fields

    def _sum_noise(self, name: str) -> SkellamMechanism | None:
        """Return the noise of which clients add shares to a field, if any."""
        return self.sum_noises.get(name, self.sum_noise)

    def _field_event(self, release: ReleasePolicy, call: Event, name: str) -> Event:
        """Return the event of one field of a reply."""
        multiplier, replacement = self._cost(release, name)
        mechanism: Mechanism = "gaussian"
        noise_multiplier = multiplier
        if self._noised_in_sums(release, name):
            mechanism = "skellam"
        elif multiplier is None:
            mechanism = "exact"
        elif math.isinf(multiplier):
            mechanism = "free"
            noise_multiplier = None
        digests: tuple[str, ...] = ()
        if mechanism in ("gaussian", "skellam"):
            digests = call.digests
        elif mechanism == "free" and self.training:
            # Another training of the same client may be behind a field that costs nothing itself.
            digests = call.digests
        return replace(
            call,
            fields=(name,),
            mechanism=mechanism,
            noise_multiplier=noise_multiplier,
            replace=replacement,
            seen=name in release.through and not self._server_cannot_read(release, name),
            digests=digests,
        )

    def _curator(self, name: str) -> TrustedCurator | None:
        """Return the trusted server's noise on a field, if it adds any.

        It adds noise only to rows that clients clip, since its scale follows from the clip norm,
        and not to fields that clients noise themselves.
        """
        pipeline = self.pipeline.of(name)
        if not pipeline.clips or name in self.fields:
            return None
        return self.curators.get(name, self.curator)

    def _server_cannot_read(self, release: ReleasePolicy, name: str) -> bool:
        """Return True if a field is sealed for other clients."""
        return self.pipeline.seal is not None and name in release.sealed

    def _cost(self, release: ReleasePolicy, name: str) -> tuple[float | None, float]:
        """Return a field's noise multiplier and its factor for replacing a record.

        The multiplier is infinite if the field shows nothing new, and None if it is exact.
        """
        if release.derived:  # post-processing of earlier releases costs nothing
            return math.inf, 1.0
        if name in self.fields:
            noise = self.fields[name]
            return noise.multiplier, noise.replacement
        if name not in release.through:  # it passes no stage that could add noise
            return None, REPLACE
        curator = self._curator(name)
        if curator:
            return curator.multiplier, REPLACE
        shares = self._sum_noise(name)
        if shares is not None and self._noised_in_sums(release, name):
            return shares.multiplier, REPLACE
        return self.pipeline.of(name).multiplier, REPLACE


def _released_fields(reply: Any) -> list[str]:
    """Return the names of a reply's fields that are not absent, each of which is released.

    An encrypted reply has the names of the fields in its ciphertexts.
    """
    encrypted: tuple[str, ...] | None = getattr(type(reply), "__encrypted__", None)
    if encrypted is not None:
        return list(encrypted)
    return [name for name, value in vars(reply).items() if value is not None]

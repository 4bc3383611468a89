"""What the server knows of the noise in clients' replies: what each of them costs, how to read it,
how much of it to take off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from securecluster.messaging.messages import Rows, Shared
from securecluster.privacy.dp.gaussian_mechanism import REPLACE, TrustedCurator
from securecluster.privacy.dp.ledger import Event, Mechanism
from securecluster.privacy.pipeline import Pipeline
from securecluster.runtime.endpoint import Release
from securecluster.training.config import LocalTraining

A = TypeVar("A")


@dataclass(frozen=True)
class ReleaseAccounting:
    """The noise of a run's replies.

    Args:
        pipeline: the stages that clients' replies go through.
        multipliers: by field of a reply, the noise multiplier of what the client's method has
            noised itself; infinite where it is post-processing of other releases, or taken as
            public. Fields that are neither here nor noised on their way are exact.
        replace: by field, the sensitivity to replacing over that to adding or removing.
        training: what DP-SGD each kind of training (`Release.trains`) is; empty where it is none.
        curator: a trusted server's noise.
        trained: by kind of training, the variance that DP-SGD's noise adds to each number of a
            client's update, on average over clients.
    """

    pipeline: Pipeline
    multipliers: Mapping[str, float] = field(default_factory=dict)
    replace: Mapping[str, float] = field(default_factory=dict)
    training: Mapping[str, LocalTraining] = field(default_factory=dict)
    curator: TrustedCurator | None = None
    trained: Mapping[str, float] = field(default_factory=dict)

    def noise(self, name: str, d: int, trains: str = "usual") -> float:
        """The expected squared norm of the noise in one row of this field, made of an update of d
        numbers, whoever added it.
        """
        pipeline, curator = self.pipeline.of(name), self._curator(name)
        return (
            pipeline.noise(d)
            + (curator.squared_noise(pipeline.width(d)) if curator else 0.0)
            + self.trained.get(trains, 0.0) * d
        )

    def read(self, release: Release, reply: A, step: int, counts: Sequence[int] | None = None) -> A:
        """A reply as the protocol sees it: decoded, and, where the server is trusted to add it,
        with noise.

        Args:
            counts: of sums, how many clients each holds: one over nobody stays zero.
        """
        changes: dict[str, Rows] = {}
        for name in release.through if reply is not None else ():
            if self._closed(release, name):
                continue
            came = getattr(reply, name)
            rows = came.values if release.derived else self.pipeline.of(name).decode(came.values)
            curator = self._curator(name)
            if curator and not release.derived:
                rows = curator.add(rows, step, name, counts)
            if rows is not came.table:
                changes[name] = Rows(rows)
        return replace(reply, **changes) if changes else reply  # type: ignore[type-var]

    def repeatable(self, release: Release, reply: Any) -> bool:
        """Return whether a second reply to the same call, of other bits, would be another release
        with a price.

        Not so of what goes out without noise, since ε is infinite then, nor of what is made of
        earlier releases.
        """
        if not release.private or release.derived:
            return False
        fields = [name for name, value in vars(reply).items() if isinstance(value, Rows | Shared)]
        multipliers = [self._cost(release, name)[0] for name in fields]
        if None in multipliers:
            return False
        return bool(self.training) or any(z is not None and not math.isinf(z) for z in multipliers)

    def per_group(self, release: Release) -> bool:
        """Return whether a trusted server adds noise to a field of this reply: once for each sum,
        where sums arrive.
        """
        return not release.derived and any(self._curator(name) for name in release.through)

    def events(self, release: Release, call: Event, reply: Any) -> Iterator[Event]:
        """Yield what clients released in one call: the training behind it, then field by field.

        Args:
            call: an event that knows the call, its clients and its reader. Its digests are of each
                client's reply, where a repetition of other bits has a price.
            reply: as it is read.
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
                kept=not release.private,
                seen=False,
            )
        if release.private:
            for name, value in vars(reply).items():
                if isinstance(value, Rows | Shared):
                    yield self._field_event(release, call, name)

    def _field_event(self, release: Release, call: Event, name: str) -> Event:
        """Return the event of one field of a reply."""
        multiplier, replacement = self._cost(release, name)
        mechanism: Mechanism = "gaussian"
        if multiplier is None:
            mechanism = "exact"
        elif math.isinf(multiplier):
            mechanism = "free"
        # Another training of the same client may be behind a field that costs nothing itself.
        repeatable = mechanism == "gaussian" or (mechanism == "free" and bool(self.training))
        return replace(
            call,
            fields=(name,),
            mechanism=mechanism,
            noise_multiplier=multiplier if mechanism == "gaussian" else None,
            replace=replacement,
            seen=name in release.through and not self._closed(release, name),
            digests=call.digests if repeatable else (),
        )

    def _curator(self, name: str) -> TrustedCurator | None:
        """The trusted server's noise on a field, which is for rows that are clipped alone."""
        return (
            self.curator if self.pipeline.of(name).clips and name not in self.multipliers else None
        )

    def _closed(self, release: Release, name: str) -> bool:
        return self.pipeline.seal is not None and name in release.sealed

    def _cost(self, release: Release, name: str) -> tuple[float | None, float]:
        """A field's noise multiplier, infinite where it tells nothing new, None where it is exact;
        and its factor for replacing.
        """
        if release.derived:
            return math.inf, 1.0
        if name in self.multipliers:
            return self.multipliers[name], self.replace.get(name, REPLACE)
        if name in release.through:
            curator = self._curator(name)
            return (curator.multiplier if curator else self.pipeline.of(name).multiplier), REPLACE
        return None, REPLACE

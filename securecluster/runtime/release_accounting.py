"""What the server knows of the noise in clients' replies: what each of them costs, how to read it,
how much of it to take off.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
        return dataclasses.replace(reply, **changes) if changes else reply  # type: ignore[type-var]

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

    def events(
        self,
        release: Release,
        method: str,
        verb: str,
        number: int,
        ids: Sequence[int],
        reply: Any,
        reader: str,
        step: int = 0,
        digests: Sequence[str] = (),
    ) -> Iterator[Event]:
        """What the clients `ids` released in round `number`, field by field, and the training
        behind it.

        Args:
            step: the number of the call.
            digests: of each client's reply, where a repetition of other bits has a price.
        """
        told = tuple(digests)
        plan = self.training.get(release.trains)
        if plan is not None:
            kept, batch = not release.private, plan.batch_size
            yield Event(
                method,
                verb,
                (),
                number,
                tuple(ids),
                "dp-sgd",
                plan.noise,
                REPLACE,
                batch,
                plan.epochs,
                kept,
                seen=False,
                reader=reader,
                step=step,
                digests=told,
            )
        for name, value in vars(reply).items() if release.private else ():
            if isinstance(value, Rows | Shared):
                z, replace = self._cost(release, name)
                kind: Mechanism = "exact" if z is None else "free" if math.isinf(z) else "gaussian"
                seen = name in release.through and not self._closed(release, name)
                known = z if kind == "gaussian" else None
                own = told if kind == "gaussian" or (kind == "free" and self.training) else ()
                yield Event(
                    method,
                    verb,
                    (name,),
                    number,
                    tuple(ids),
                    kind,
                    known,
                    replace,
                    seen=seen,
                    reader=reader,
                    step=step,
                    digests=own,
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

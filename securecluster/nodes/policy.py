"""What the owner of a client allows runs to do with its data.

A server proposes a run, and the node of a client checks the proposal against this policy, which no
server can change.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from securecluster.errors import OwnerPolicyError, UsageError
from securecluster.privacy.dp.budget import UNITS
from securecluster.privacy.dp.ledger import DELTA


@dataclass(frozen=True)
class Policy:
    """Conditions of runs that a client takes part in; by default any of its own protocol.

    Args:
        protocols: names of protocols; None allows any.
        masks: names of masks; None allows any.
        aggregations: protections of sums, such as secagg; None allows any.
        relevances: protections of pairs, such as pads; None allows any.
        least_noise: smallest noise multiplier of any release of a run; an exact one has 0.
        least_clients: smallest number of clients of a run, and of members and survivors of each sum
            that is hidden: an average over few tells more of each.
        most_runs: number of runs that may be agreed to over the life of the node; None is no bound.
        most_epsilon: largest ε of all runs together, which the node's own ledger holds.
        delta: δ of that ε.
        unit: what runs protect, "client" or "example"; None allows both, and no `most_epsilon`.
        placements: of the noise, such as local; None allows any.
        samples: whether the server may be told the number of samples, but in a hidden sum over
            several clients.
        roster: whether runs need a roster.
        scores: whether the server may be told the score on the client's test samples, once at the
            end of a run, which no ε covers; None allows it where a run adds no noise, and the
            server reads the replies of single clients as well.
        server: name of the server that the client answers; None answers any.

    Raises:
        UsageError: a value out of range.
    """

    protocols: Sequence[str] | None = None
    masks: Sequence[str] | None = None
    aggregations: Sequence[str] | None = None
    relevances: Sequence[str] | None = None
    placements: Sequence[str] | None = None
    least_noise: float = 0.0
    least_clients: int = 0
    most_runs: int | None = None
    most_epsilon: float | None = None
    delta: float = DELTA
    unit: str | None = None
    samples: bool = True
    roster: bool = True
    scores: bool | None = None
    server: str | None = None

    def __post_init__(self) -> None:
        if self.unit is not None and self.unit not in UNITS:
            raise UsageError(f"unit is {self.unit!r}: runs protect a client or an example")
        if self.most_epsilon is not None and self.unit is None:
            raise UsageError(
                "most_epsilon is of one unit, since the costs of two do not add up: give unit too, "
                "client or example"
            )
        numbers = {
            "least_noise": self.least_noise,
            "least_clients": self.least_clients,
            "delta": self.delta,
        }
        if self.most_epsilon is not None:
            numbers["most_epsilon"] = self.most_epsilon
        if self.most_runs is not None and (type(self.most_runs) is not int or self.most_runs < 0):
            raise UsageError(f"most_runs is {self.most_runs!r}: give a whole number of at least 0")
        for name, value in numbers.items():
            if not _is_number(value) or value < 0:
                raise UsageError(f"{name} is {value!r}: give a number of at least 0")

    @classmethod
    def load(cls, path: Path | str) -> Policy:
        """Return the policy of a TOML file, with one line for each field.

        Args:
            path: of the file.

        Raises:
            UsageError: no such file, no TOML, or a field that no policy has.
        """
        path = Path(path)
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageError(
                f"there is no policy {path}: write one, of which an empty file allows all"
            ) from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
            raise UsageError(f"{path} is no policy in TOML: {error}") from None
        try:
            for name, value in content.items():
                _check_entry(name, value)
            return cls(**content)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None

    def check(self, config: Mapping[str, Any]) -> None:
        """Check that a run is allowed.

        Args:
            config: that clients and server are to agree on.

        Raises:
            OwnerPolicyError: it is not.
        """
        named = {
            "protocol": self.protocols,
            "mask": self.masks,
            "aggregation": self.aggregations,
            "relevance": self.relevances,
            "placement": self.placements,
        }
        for entry, allowed in named.items():
            # an option without effect is in no configuration
            value = config.get(entry, "plain")
            if allowed is not None and value not in allowed:
                listed = ", ".join(allowed) or "none at all"
                raise OwnerPolicyError(f"this client allows {entry} {listed}, and not {value}")
        # of each release: `policy_events`
        noise = float(config["noise"])
        if noise < self.least_noise:
            raise OwnerPolicyError(
                f"this client allows noise multipliers of at least {self.least_noise:g}, and the "
                f"run has {noise:g}"
            )
        clients = int(config["clients"])
        if clients < self.least_clients:
            raise OwnerPolicyError(
                f"this client takes part in runs of at least {self.least_clients:g} clients, and "
                f"this one has {clients}"
            )
        # of cohorts: `check_run`
        participation = float(config.get("participation", 1.0))
        round_clients = round(participation * clients)
        if config.get("aggregation", "plain") != "plain" and round_clients < self.least_clients:
            raise OwnerPolicyError(
                f"this client takes part in sums over at least {self.least_clients:g} clients, and "
                f"a round of this run asks {round_clients}"
            )
        unit = config["dp_unit"]
        if self.unit is not None and unit != self.unit:
            raise OwnerPolicyError(
                f"this client's unit of privacy is {self.unit}, and the run's {unit}"
            )
        if self.roster and "roster" not in config:
            raise OwnerPolicyError(
                "this client takes part only in runs with a roster of public keys"
            )


LISTS = ("protocols", "masks", "aggregations", "relevances", "placements")
SWITCHES = ("samples", "roster", "scores")


def _check_entry(name: str, value: Any) -> None:
    """Raise UsageError for an entry that no policy has, or of another type."""
    known_names = [field.name for field in fields(Policy)]
    if name not in known_names:
        raise UsageError(f"a policy has no {name}: choose of {', '.join(known_names)}")
    if name in LISTS and not _are_names(value):
        raise UsageError(f'{name} is a list of names, such as ["none"]')
    if name in SWITCHES and not isinstance(value, bool):
        raise UsageError(f"{name} is true or false")
    if name == "server" and not isinstance(value, str):
        raise UsageError('server is a name, such as "aggregator"')
    if name not in (*LISTS, *SWITCHES, "unit", "server") and not _is_number(value):
        raise UsageError(f"{name} is a number")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)

"""What a run would release, by a run of stand-ins, against what the owner of a client allows.

A configuration has many options of noise, and new ones come with new methods. So an owner's policy
is compared with releases and not with options: the server's loop runs with stand-ins for clients
(`dry_run`), as for a target ε, and every release that their ledger has counts by itself.

The *multiplier* of a release is the standard deviation of its noise over the most that blanking one
unit of privacy moves it. An exact release has 0. That of a training with sampled batches is of one
step; that of a sum with noise in shares is of the fewest survivors that clients accept. How many
releases there are, and what sampling saves, is for `most_epsilon`.

The same rules hold again for each reply (`ReleaseFloor`, `Endpoint.tells_samples`): a server may do
what no stand-in saw.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from securecluster.errors import OwnerPolicyError, text_of
from securecluster.messaging.bounds import sample_fields
from securecluster.messaging.messages import Call
from securecluster.nodes.policy import Policy
from securecluster.parties.derived import as_agreed, needs_samples, params_as_json
from securecluster.parties.dry_run import events_of_stand_ins
from securecluster.parties.method import Method
from securecluster.privacy.cohorts import Cohorts
from securecluster.privacy.dp.ledger import COSTLESS, Event
from securecluster.runtime.endpoint import SUM, least_members
from securecluster.runtime.release_floor import multiplier_of

if TYPE_CHECKING:
    from securecluster.data.facts import Facts


@dataclass(frozen=True)
class Rehearsed:
    """Releases of stand-ins in a run.

    Args:
        multipliers: the least of each field's releases, by "method.field"; where `target_epsilon`
            is to find the noise, over the run's.
        counts: fields in which the server reads a client's number of samples.
    """

    multipliers: Mapping[str, float]
    counts: tuple[str, ...]


_KNOWN: dict[str, Rehearsed] = {}


def check_run(policy: Policy, method: Method, facts: Facts, config: Mapping[str, Any]) -> None:
    """Check that the owner of a client allows a run, and what leaves the client in it.

    Args:
        policy: of the owner.
        method: the client's own protocol object.
        facts: of the clients and their data.
        config: that clients and server are to agree on.

    Raises:
        OwnerPolicyError: the owner does not.
    """
    policy.check(config)
    if needs_samples(method) and not policy.samples:
        raise OwnerPolicyError(
            "this client does not tell its number of samples, which the run needs"
        )
    _check_cohorts(policy, method, config)
    if policy.least_noise == 0 and policy.samples:
        return
    method = as_agreed(method, config)
    rehearsed = _rehearsed(method, facts, config)
    if rehearsed.counts and not policy.samples:
        raise OwnerPolicyError(
            f"this client does not tell its number of samples, and {method.name} sends it in the "
            f"clear as {rehearsed.counts[0]}: give a clip, or take a uniform average where there "
            "is one"
        )
    scale = float(config["noise"]) if method.privacy.target_epsilon is not None else 1.0
    for name, multiplier in rehearsed.multipliers.items():
        if scale * multiplier < policy.least_noise:
            noise = f"with {scale * multiplier:g}" if multiplier else "without noise"
            raise OwnerPolicyError(
                f"this client allows noise multipliers of at least {policy.least_noise:g}, and in "
                f"this run {name} leaves {noise}"
            )


def _check_cohorts(policy: Policy, method: Method, config: Mapping[str, Any]) -> None:
    """Raise OwnerPolicyError for a run whose cohorts are too small."""
    size = config.get("cohort_size")
    if not method.sums.hide_replies or size == 0:
        return
    clients = range(int(config["clients"]))
    minimum = max(least_members(config), method.sums.least_cohort(method))
    # their sizes are those of any order of the clients
    cohorts = Cohorts(minimum, float(config["participation"]), size, tuple(clients)).of(clients)
    smallest = min(map(len, cohorts))
    if smallest < policy.least_clients:
        raise OwnerPolicyError(
            f"this client takes part in sums over at least {policy.least_clients:g} clients, and "
            f"this run sums over cohorts of {smallest}: let it have a larger cohort_size"
        )


def _rehearsed(method: Method, facts: Facts, config: Mapping[str, Any]) -> Rehearsed:
    """Return what stand-ins send in a run, which is found once.

    Raises:
        OwnerPolicyError: a run that stand-ins cannot carry out.
    """
    clients = int(config["clients"])
    known_by = (
        f"{type(method).__module__}.{type(method).__qualname__}",
        params_as_json(method),
        list(facts.shape),
        facts.classes,
        facts.objective.as_json(),
        clients,
    )
    key = json.dumps(known_by, sort_keys=True, default=str)
    if key not in _KNOWN:
        counts: dict[str, None] = {}

        def watch(call: Call, reply: Any) -> Any:
            hidden = call.verb == SUM and method.sums.hide_replies
            for name in () if hidden else sample_fields(type(reply)):
                if getattr(reply, name) is not None:
                    counts[f"{call.method}.{name}"] = None
            return reply

        try:
            events = events_of_stand_ins(method, facts, clients, watch)
        except Exception as error:  # also of a method of somebody else's
            raise OwnerPolicyError(
                f"this client's policy is about what leaves, and what {method.name} sends could "
                f"not be found by a run without data ({type(error).__name__}: {text_of(error)})"
            ) from error
        _KNOWN[key] = Rehearsed(_least(events), tuple(counts))
    return _KNOWN[key]


def _least(events: Iterable[Event]) -> dict[str, float]:
    """Return the least multiplier of each field, the smallest first."""
    smallest: dict[str, float] = {}
    for event in events:
        if event.mechanism in COSTLESS:
            continue
        field = event.fields[0] if event.fields else "training"
        name = f"{event.method}.{field}"
        smallest[name] = min(multiplier_of(event), smallest.get(name, float("inf")))
    return dict(sorted(smallest.items(), key=lambda item: (item[1], item[0])))

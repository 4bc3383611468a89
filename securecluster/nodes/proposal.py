"""Agreement on a run: facts that clients tell, what a server proposes, and what a client accepts.

Server and client each derive the configuration from their own protocol object and the facts of all
clients. So a client does not take the server's word for any hyper-parameter: it compares.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.data.facts import ClientFacts, Facts
from securecluster.errors import (
    FrameError,
    OwnerPolicyError,
    ProposalError,
    RunFolderError,
    UsageError,
)
from securecluster.folders import run_folder
from securecluster.messaging import run_number
from securecluster.models.objectives import objective
from securecluster.nodes.policy import Policy
from securecluster.nodes.policy_events import check_run
from securecluster.parties import public_randomness
from securecluster.parties.derived import needs_samples
from securecluster.parties.method import Method
from securecluster.privacy.masking.identities import AUTHORITY_NUMBER

if TYPE_CHECKING:
    from securecluster.privacy.masking.identities import Roster

MOST_CLIENTS = 1 << 20
DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class Proposal:
    """A run that a server proposes to clients.

    Args:
        config: that clients and server are to agree on.
        samples: number of training samples of each client, where the configuration follows from
            them; else None.
        facts: what the data of all clients have in common, for a key authority, which has none;
            None in runs without one.
        joins: whether it is a finished run, of which newcomers join the clusters.
        commitments: of all clients to their nonces, for which the server asks; None before.
    """

    config: Mapping[str, Any]
    samples: tuple[int, ...] | None = None
    facts: ClientFacts | None = None
    joins: bool = False
    commitments: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls,
        method: Method,
        facts: Facts,
        dtype: str,
        roster: Roster | None,
        folder: Path | str | None = None,
    ) -> Proposal:
        """Return the proposal of a server.

        Args:
            method: its protocol.
            facts: of all clients.
            dtype: of the models.
            roster: public keys of the clients; None where nothing is verified.
            folder: of the server's run. A run that is there goes on, under its own number and with
                the nonces of its clients; every other one begins, under a new number.

        Raises:
            RunFolderError: a run in the folder that has ended, or that cannot be read.
            UsageError: a method that does not work with these facts.
        """
        samples = facts.sizes if needs_samples(method) else None
        shared = facts.shared if method.pairs.by_authority else None
        number: str | None = run_number.drawn()
        if folder is None or not run_folder.is_run(Path(folder)):
            return cls(agreed_config(method, facts, dtype, roster, number), samples, shared)
        earlier_config = _config_in(Path(folder))
        config = agreed_config(method, facts, dtype, roster, run_number.of(earlier_config))
        return cls(_as_drawn(config, earlier_config, roster, Path(folder)), samples, shared)

    def packed(self) -> bytes:
        """Return the proposal as bytes."""
        facts = None if self.facts is None else self.facts.as_json()
        content = {
            "config": dict(self.config),
            "samples": self.samples,
            "facts": facts,
            "joins": self.joins,
            "commitments": self.commitments,
        }
        return json.dumps(content, sort_keys=True).encode()

    @classmethod
    def unpacked(cls, data: bytes) -> Proposal:
        """Return the proposal that a server sent.

        Args:
            data: from a server that may send anything.

        Raises:
            FrameError: no proposal.
        """
        try:
            content = json.loads(data)
            config, samples = content["config"], content["samples"]
            facts, joins = content["facts"], content["joins"] is True
            facts = None if facts is None else ClientFacts.read(facts)
            described = [config["protocol"], config["dtype"], config["mask"]]
            counted = [config["clients"], config["classes"], *(samples or ())]
            commitments = content.get("commitments")
            commitments = None if commitments is None else tuple(map(str, commitments))
            texts_valid = all(isinstance(value, str) for value in described)
            texts_valid = texts_valid and config["dtype"] in DTYPES
            counts_valid = all(type(n) is int and 0 <= n < MOST_CLIENTS for n in counted)
            run_number.of(config)
        except (KeyError, TypeError, ValueError, RecursionError, UsageError):
            raise FrameError("the server proposed no run") from None
        if not texts_valid or not counts_valid or type(config["seed"]) is not int:
            raise FrameError("the server proposed no run")
        samples = None if samples is None else tuple(samples)
        return cls(config, samples, facts, joins, commitments)


def _config_in(folder: Path) -> Mapping[str, Any]:
    """Return what was agreed on of the run in a folder, which goes on there."""
    run_folder.check_under_way(folder)
    config: Mapping[str, Any] = run_folder.run_config(folder)["network"]
    try:
        run_number.of(config)
    except ValueError as error:
        raise RunFolderError(f"{folder} has no run that can go on: {error}") from None
    return config


def _as_drawn(
    config: dict[str, Any], earlier: Mapping[str, Any], roster: Roster | None, folder: Path
) -> dict[str, Any]:
    """Return a configuration with the nonces of the run in a folder, which goes on."""
    if roster is None or not public_randomness.is_drawn(earlier):
        return config
    derived = json.loads(json.dumps(config))
    proposed = public_randomness.proposed_of(earlier)
    differing = [
        name for name in sorted(derived | proposed) if derived.get(name) != proposed.get(name)
    ]
    if differing:
        raise RunFolderError(
            f"{folder} holds a run of another configuration ({', '.join(differing)}): resume with "
            "the same one, or give another folder"
        )
    nonces = public_randomness.nonces_in(earlier)
    return public_randomness.Draw(config, roster).configured(nonces)


def agreed_config(
    method: Method, facts: Facts, dtype: str, roster: Roster | None, number: str | None
) -> dict[str, Any]:
    """Return the configuration of a run on many machines.

    Args:
        method: the protocol.
        facts: of all clients.
        dtype: of the models.
        roster: public keys of the clients, whose digest the configuration has; None for none.
        number: of the run; None for one of an earlier version.

    Raises:
        UsageError: a key authority that is not on the roster, so that clients would take anybody's
            key for its own.
    """
    config = method.config(facts, dtype)
    if number is not None:
        config = {**config, run_number.NAME: number}
    if roster is None:
        return config
    if method.pairs.by_authority and roster.key(AUTHORITY_NUMBER) is None:
        raise UsageError(
            f"{method.name} encrypts for a key authority, and the roster has no key of it: add the "
            "line `authority KEY`, with the key that securecluster node init --role authority "
            "printed"
        )
    return {**config, "roster": roster.digest}


def accepted(
    proposal: Proposal,
    method: Method,
    own_facts: ClientFacts,
    number: int,
    policy: Policy,
    roster: Roster | None,
) -> dict[str, Any]:
    """Return the configuration of a proposed run, which a client derived itself.

    Args:
        proposal: of the server.
        method: the client's own protocol object.
        own_facts: facts of the client's data, with its numbers of samples and classes.
        number: of the client.
        policy: of its owner.
        roster: that the owner was given; None for none.

    Raises:
        ProposalError: another run than this client takes part in, or one that its owner forbids.
        UsageError: a method that does not work with these facts.
    """
    _check_protocol(proposal, method)
    proposed = proposal.config
    clients = int(proposed["clients"])
    # a newcomer's number is beyond those of the clients of the run
    if (number >= clients) is not proposal.joins:
        without = "with" if proposal.joins else "without"
        raise ProposalError(f"the server proposes a run of {clients} clients {without} this one")
    if own_facts.classes is not None and int(proposed["classes"]) < own_facts.classes:
        raise ProposalError(
            f"the server proposes {proposed['classes']} classes, and this client's data need more"
        )
    _check_samples(proposal, method, own_facts, number, policy)
    return _derived(proposal, method, own_facts, policy, roster)


def accepted_by_authority(
    proposal: Proposal, method: Method, policy: Policy, roster: Roster | None
) -> dict[str, Any]:
    """Return the configuration of a proposed run, which a key authority derived itself.

    It has no data, so it takes the server's word for facts of the clients' data. A server that
    tells it others than clients have gets another fingerprint of the run, under which no client's
    ciphertexts can be opened.

    Args:
        proposal: of the server.
        method: the authority's own protocol object.
        policy: of its owner.
        roster: that the owner was given; None for none.

    Raises:
        ProposalError: another run than this authority takes part in, or one that its owner forbids.
        UsageError: a method that does not work with these facts.
    """
    _check_protocol(proposal, method)
    if not method.pairs.by_authority or proposal.facts is None:
        raise ProposalError("the server proposes a run without a key authority")
    samples = proposal.samples or ()
    if needs_samples(method) and len(samples) != int(proposal.config["clients"]):
        raise ProposalError("the server proposes other numbers of samples than there are clients")
    return _derived(proposal, method, proposal.facts, policy, roster)


def _check_protocol(proposal: Proposal, method: Method) -> None:
    """Raise ProposalError for a run of another protocol."""
    proposed = proposal.config["protocol"]
    if proposed != method.name:
        raise ProposalError(f"the server proposes {proposed}, and this client runs {method.name}")


def _derived(
    proposal: Proposal,
    method: Method,
    own_facts: ClientFacts,
    policy: Policy,
    roster: Roster | None,
) -> dict[str, Any]:
    """Return the configuration that follows from a method and facts, which is the proposed one.

    Raises:
        ProposalError: it is not, or its owner forbids it.
    """
    proposed = public_randomness.proposed_of(proposal.config)
    facts = facts_in(proposed, own_facts, proposal.samples)
    # all but number and seed is derived here: the server draws the one, and clients the other
    number = run_number.of(proposed)
    config = agreed_config(method, facts, str(proposed["dtype"]), roster, number)
    _check_equal(proposed, config)
    check_run(policy, method, facts, config)
    if roster is None or not public_randomness.is_drawn(proposal.config):
        return config
    nonces = public_randomness.nonces_in(proposal.config)
    drawn = public_randomness.Draw(config, roster).configured(nonces)
    _check_equal(proposal.config, drawn)
    return drawn


def facts_in(
    config: Mapping[str, Any], own_facts: ClientFacts, samples: tuple[int, ...] | None = None
) -> Facts:
    """Return the facts of all clients of a run, as one of them knows them.

    Args:
        config: of the run.
        own_facts: facts of the client's data.
        samples: number of training samples of each client; None where no client told it.
    """
    return Facts(
        clients=int(config["clients"]),
        x=own_facts.x,
        y=own_facts.y,
        classes=int(config["classes"]),
        seed=int(config["seed"]),
        objective=objective(own_facts.objective),
        feature_names=own_facts.feature_names,
        class_names=own_facts.class_names,
        scaling=own_facts.scaling,
        bright=own_facts.bright,
        mean=own_facts.mean,
        samples=samples,
    )


def _check_samples(
    proposal: Proposal, method: Method, own_facts: ClientFacts, number: int, policy: Policy
) -> None:
    """Raise ProposalError for numbers of samples that are not the clients'."""
    if not needs_samples(method):
        return
    if not policy.samples:
        raise OwnerPolicyError(
            "this client does not tell its number of samples, which the run needs"
        )
    samples = proposal.samples or ()
    clients = int(proposal.config["clients"])
    if len(samples) != clients or (number < clients and samples[number] != own_facts.samples):
        raise ProposalError("the server proposes other numbers of samples than the clients told")


def _check_equal(proposed: Mapping[str, Any], derived: Mapping[str, Any]) -> None:
    """Raise ProposalError for a proposal that is not what this client's own protocol gives."""
    # as the other side of a wire reads it, where a tuple is a list
    expected = json.loads(json.dumps(derived))
    if dict(proposed) == expected:
        return
    names = sorted(proposed.keys() | expected.keys())
    name, *others = [name for name in names if proposed.get(name) != expected.get(name)]
    too = f" (and {', '.join(others)} differ, too)" if others else ""
    raise ProposalError(
        f"the server proposes {name} = {_short(proposed.get(name))}, and this client's protocol "
        f"has {_short(expected.get(name))}{too}"
    )


def _short(value: Any) -> str:
    """Return a value as a sentence shows it."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"

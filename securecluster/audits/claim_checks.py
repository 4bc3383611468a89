"""Checks of claims: a claim's attack on a small run with the protection, and on one without it.

A package outside this project declares its claims as entry points, in its pyproject.toml:

    [project.entry-points."securecluster.claims"]
    neighbours-in-sums = "my_package.neighbours:IN_SUMS"

`check_claim("neighbours-in-sums")` then checks the `Claim` that is called IN_SUMS there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from securecluster.attacks.base import Tap
from securecluster.attacks.experiments import tapped, with_malicious_updates
from securecluster.attacks.registry import attack_named
from securecluster.audits.claims import Claim, Row
from securecluster.audits.findings import Finding
from securecluster.audits.run_audit import adversary_of, finding_of
from securecluster.audits.twins import twin_of
from securecluster.core import installed_packages
from securecluster.data.federation import Federation
from securecluster.errors import UsageError
from securecluster.messaging.messages import Rows
from securecluster.parties.derived import initial_model
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.registry import protocol_class
from securecluster.runtime.settings import Settings

GROUP = "securecluster.claims"
PARTS = installed_packages.Parts("claim", GROUP)
# one full-batch step a round, at few clients
SMALL: dict[str, Any] = {
    "rounds": 2,
    "epochs": 1,
    "batch_size": 30,
    "model": "linear",
    "mask": "none",
}
MANY = 40  # clients, for whom digits has fewer samples each


def claim_names() -> list[str]:
    """Return the names of the claims that installed packages declare."""
    return PARTS.names()


def claim_named(name: str) -> Claim:
    """Return a claim of an installed package.

    Args:
        name: of its entry point.

    Raises:
        UsageError: an unknown name, or a declaration that does not lead to a claim.
    """
    if not PARTS.declared():
        raise UsageError(f"no installed package declares claims: declare {name!r} in {GROUP}")
    declaration, claim = PARTS.loaded(PARTS.point(name))
    if not isinstance(claim, Claim):
        raise UsageError(f"{declaration}, is no Claim: name one of its module")
    return claim


def check_claim(claim: Claim | str) -> Row:
    """Run a claim's attack with the protection and without it.

    Args:
        claim: a claim, or the name of one that an installed package declares.

    Returns:
        Both findings, whether the claim `holds`, and in `failure` why it does not.

    Raises:
        UsageError: an unknown claim, attack, party or protocol, or options that it refuses.
    """
    if isinstance(claim, str):
        claim = claim_named(claim)
    on = _finding(claim)
    if not claim.weights:
        return Row(claim, on, _finding(replace(claim, protection={})))
    if not claim.hidden:
        return Row(claim, on, on)
    return Row(claim, on, _finding(claim, send_weights=True))


def _finding(claim: Claim, send_weights: bool = False) -> Finding:
    """Return what a claim's attack achieves on its run.

    Args:
        claim: the claim.
        send_weights: True if clients send θ_0 and their moves.
    """
    attack = attack_named(claim.attack)
    federation = _federation(claim)
    helpers = ",".join(f"client:#{position}" for position in claim.helpers)
    adversary = adversary_of(federation.names, claim.party, helpers)
    fitted, taps = _run(claim, send_weights)
    return finding_of(attack, fitted, federation, adversary, taps)


def _run(claim: Claim, send_weights: bool) -> tuple[ClusteringProtocol, list[Tap]]:
    """Return a claim's run and its taps; without a protection it is an unprotected twin.

    Args:
        claim: the claim.
        send_weights: True if clients send θ_0 and their moves.
    """
    made: ClusteringProtocol = protocol_class(claim.protocol)()
    small = {name: value for name, value in SMALL.items() if name in made.get_params()}
    made.set_params(**{**small, **claim.options, **claim.protection})
    if not claim.protection:
        made = twin_of(made)
    federation = _federation(claim)
    # a check repeats bit for bit
    settings = Settings(transcript="full", threads=1, keys_from_seed=True)
    if not send_weights:
        return tapped(made, federation, settings)
    start = initial_model(made, federation).initial()

    def add_start(client: int, row: Any, round: int) -> Any:
        return row + start

    _, moves = _run(claim, send_weights=False)
    taps = []
    for tap in moves:
        delta = getattr(tap.reply, "delta", None)
        if delta is not None:
            sent = replace(tap.reply, delta=Rows(delta.values + start))
            taps.append(replace(tap, reply=sent))
    clients = range(claim.clients)
    return with_malicious_updates(made, federation, clients, add_start, settings), taps


def _federation(claim: Claim) -> Federation:
    """Return the clients of a claim's run.

    Args:
        claim: the claim.
    """
    samples = 30 if claim.clients < MANY else 20
    return Federation.simulate(
        "digits", scenario=claim.scenario, clients=claim.clients, samples=samples, seed=0
    )

"""What a successful attack says of a run: a broken protection, or something that stays visible."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from securecluster import Federation
from securecluster.attacks.registry import ATTACKS, attack_named
from securecluster.attacks.scoring import Interval, Score
from securecluster.audits import claimed_protections as protections
from securecluster.audits import run_audit as audit
from securecluster.audits.findings import BROKEN, UNTOLD, VISIBLE, Finding
from securecluster.protocols.registry import protocol_class
from securecluster.statements.disclosures import disclosures

SMALL: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "linear", "mask": "none"}
CLIENTS = 6
UNTESTED = "untested"
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("cfl", {}),
    "masked": ("cfl", {"mask": "permutation"}),
    "summed": ("fedavg", {"aggregation": "secagg"}),
    "noised": ("fedavg", {"clip": 1.0, "noise": 3.0}),
    "central": ("fedavg", {"clip": 1.0, "noise": 3.0, "placement": "central"}),
    "encrypted": ("oneshot", {"tasks": 2, "relevance": "ckks"}),
    "sketched": ("cfl", {"aggregation": "secagg", "sketch": 16}),
    "sealed": ("oneshot", {"tasks": 2, "sealed": True}),
    "open": ("oneshot", {"tasks": 2, "sealed": False}),
    "padded": ("oneshot", {"tasks": 2, "sealed": False, "relevance": "pads"}),
    "blocks": ("signature", {"signature_blocks": "blocks", "mask": "permutation"}),
    # who is in which cluster is hidden by secure sums alone
    "hidden": ("hidden", {"k": 2}),
    "choices": ("ifca", {"k": 2, "starts": 1, "aggregation": "secagg"}),
    "sketches": ("signature", {"signature_blocks": "plain", "mask": "permutation"}),
}
# of updates one by one, hidden by masks and secure sums
OF_UPDATES = (VISIBLE, BROKEN, BROKEN, VISIBLE)
# of what masks keep: inner products, sorted values, columns that move alike, one known row
UNDER_MASKS = (VISIBLE, VISIBLE, BROKEN, VISIBLE)
NEVER = (VISIBLE, VISIBLE, VISIBLE, VISIBLE)
OF_MODELS = (VISIBLE, BROKEN, VISIBLE, VISIBLE)
OF_NOISE = (UNTESTED, UNTESTED, UNTESTED, BROKEN)
# if better than chance on the plain, the masked, the summed and the noised run
STANDINGS = {
    "centres-over-rounds": OF_UPDATES,
    "ckks-release": (UNTESTED, UNTESTED, UNTESTED, UNTESTED),
    "cluster-identity": UNDER_MASKS,
    # clusters, and what follows from them, are the server's own result
    "cluster-property": NEVER,
    "crafted-model": OF_MODELS,
    "differencing": UNDER_MASKS,
    # a bound above the ledger's ε breaks the noise, and nothing else does
    "dp-audit-eigenvectors": NEVER,
    "dp-audit-gram": NEVER,
    "dp-audit-losses": NEVER,
    "dp-audit-one-run": NEVER,
    "dp-audit-signatures": NEVER,
    "dp-audit-training": NEVER,
    "dp-audit-two-worlds": NEVER,
    "gradient-inversion-analytic": OF_UPDATES,
    "gradient-inversion-cosine": OF_UPDATES,
    "gradient-inversion-dlg": OF_UPDATES,
    # two runs that differ in a client, which no claim is about
    "hidden-cluster": NEVER,
    "hidden-differencing": NEVER,
    "hidden-label-counts": NEVER,
    "hidden-membership": NEVER,
    "label-counts": OF_UPDATES,
    "label-distributions": UNDER_MASKS,
    "linkage": UNDER_MASKS,
    # of blocks, which none of these runs has
    "lone-blocks": NEVER,
    "long-updates": (VISIBLE, VISIBLE, BROKEN, BROKEN),
    "low-bits": OF_NOISE,
    "mask-invariants": UNDER_MASKS,
    "mask-known-plaintext": UNDER_MASKS,
    "mask-public-model": OF_UPDATES,
    # of eigenvectors, relevance and signatures, which none of these runs has
    "mean-image": NEVER,
    "membership-all-rounds": OF_UPDATES,
    "membership-cluster-model": OF_MODELS,
    "membership-likelihood-ratio": OF_UPDATES,
    "membership-likelihood-ratio-offline": OF_UPDATES,
    "membership-loss-threshold": OF_UPDATES,
    "relevance-oracle": NEVER,
    "repeated-mask": OF_UPDATES,
    "repeated-seed": OF_NOISE,
    "secure-sum-conformance": (UNTESTED, UNTESTED, BROKEN, UNTESTED),
    "signature-label-counts": NEVER,
    "signature-membership": NEVER,
    "source-inference": OF_UPDATES,
    "subspace-composition": NEVER,
    "subspace-membership": NEVER,
    # of counts and blocks by cluster, which none of these runs has
    "sums-over-rounds-clusters": NEVER,
    "sums-over-rounds-labels": OF_UPDATES,
    "sums-over-rounds-sizes": UNDER_MASKS,
    "sums-single-coordinate": OF_UPDATES,
}
TABLE = [
    (attack, run, standing)
    for attack, row in STANDINGS.items()
    for run, standing in zip(("plain", "masked", "summed", "noised"), row, strict=True)
]
# runs of other methods, and adversaries with clients among them
ELSEWHERE = [
    ("mean-image", "sealed", (), BROKEN),
    ("mean-image", "open", (), VISIBLE),
    ("subspace-membership", "sealed", (), BROKEN),
    ("subspace-composition", "sealed", (2,), VISIBLE),
    ("relevance-oracle", "padded", (), BROKEN),
    ("relevance-oracle", "sealed", (), VISIBLE),
    ("relevance-oracle", "padded", (2,), VISIBLE),
    ("signature-label-counts", "blocks", (), VISIBLE),
    ("signature-label-counts", "sketches", (), BROKEN),
    ("signature-membership", "sketches", (), BROKEN),
    ("ckks-release", "encrypted", (), BROKEN),
    ("relevance-oracle", "encrypted", (), BROKEN),
    ("label-counts", "summed", (), BROKEN),
    ("sums-over-rounds-labels", "summed", (), BROKEN),
    ("sums-over-rounds-sizes", "summed", (), BROKEN),
    ("sums-over-rounds-clusters", "hidden", (), BROKEN),
    ("lone-blocks", "hidden", (), BROKEN),
    ("lone-blocks", "choices", (), BROKEN),
    ("sums-single-coordinate", "summed", (), BROKEN),
    ("sums-over-rounds-clusters", "choices", (), BROKEN),
    # averages that a client sends on are made of secure sums
    ("linkage", "sketched", (), BROKEN),
    ("repeated-seed", "central", (), UNTESTED),
    # a client gives the seed of masks away, and no other client's row of a secure sum
    ("label-counts", "masked", (2,), VISIBLE),
    ("label-counts", "summed", (2,), BROKEN),
    ("label-counts", "summed", (0, 1, 2, 3, 4), VISIBLE),
]


@cache
def disclosed(run: str) -> Any:
    """Return the disclosures of a small run."""
    name, options = RUNS[run]
    federation = Federation.simulate("digits", clients=CLIENTS, samples=20, seed=0)
    return disclosures(protocol_class(name)(**{**SMALL, **options}).fit(federation).result_)


def standing_of(name: str, run: str, parties: tuple[Any, ...], value: float = 0.9) -> str:
    """Return what a score of an attack says of a run."""
    attack = attack_named(name)
    colluding = tuple(party for party in parties if isinstance(party, int))
    claims = protections.claimed(attack, disclosed(run), parties, colluding, CLIENTS)
    if name in audit._untried([attack], {name: claims}):
        return UNTESTED
    result = Score("x", value, None, 0.5, Interval(0.4, 0.6), True, 9)
    return Finding(name, result, "", 0.0, claims=claims).verdict


def test_every_attack_has_a_row() -> None:
    assert list(STANDINGS) == list(ATTACKS)


@pytest.mark.parametrize(("attack", "run", "standing"), TABLE)
def test_a_success_breaks_only_what_the_run_claims(attack: str, run: str, standing: str) -> None:
    assert standing_of(attack, run, ("server",)) == standing
    # without a twin nothing follows from a score within the range of chance
    failed = {BROKEN: UNTOLD, VISIBLE: UNTOLD, UNTESTED: UNTESTED}
    assert standing_of(attack, run, ("server",), 0.5) == failed[standing]


@pytest.mark.parametrize(("attack", "run", "colluding", "standing"), ELSEWHERE)
def test_claims_depend_on_fields_and_on_who_colludes(
    attack: str, run: str, colluding: tuple[int, ...], standing: str
) -> None:
    assert standing_of(attack, run, ("server", *colluding)) == standing


def test_encryption_is_not_claimed_against_server_and_authority_together() -> None:
    assert standing_of("relevance-oracle", "encrypted", ("authority",)) == BROKEN
    assert standing_of("relevance-oracle", "encrypted", ("server", "authority")) == VISIBLE

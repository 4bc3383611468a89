"""What an adversary can undo is undone before every attack: a mask by one colluder's seed."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from cases import CFL, EVERY_PROTOCOL, IFCA, MASKS, Local, Protocol, build, two_clusters

from securecluster import Federation
from securecluster.attacks.dp_audit import CanaryAudit
from securecluster.attacks.experiments import tapped
from securecluster.attacks.registry import attack_named, attack_names
from securecluster.audits.findings import Finding
from securecluster.audits.run_audit import Adversary, finding_of
from securecluster.messaging.parties import client
from securecluster.protocols import FedAvg, OneShot, Settings

RESAMPLES = (20, 10)
# runs of one round find no clusters
pytestmark = pytest.mark.filterwarnings("ignore::securecluster.errors.SecureClusterWarning")
COLLUDER = 2
CLIENTS = 6
ADVERSARY = Adversary(("server", client(COLLUDER)), (COLLUDER,), "the server and a client")
EXACT = Settings(transcript="full", threads=1, dtype="float64", keys_from_seed=True)
# shadow models and searches for samples, which take what the cheap ones take: updates and models
SLOW = ("likelihood", "inversion-cosine", "inversion-dlg")
# they read models of averages, which come as moves where they are masked
OF_AVERAGES = ("membership-all-rounds", "membership-cluster-model")
TRAINED = [protocol for protocol in EVERY_PROTOCOL if protocol is not Local]
# each protocol under a mask, and each mask under several; a dense one takes minutes to attack
QUICK = [mask for mask in MASKS if mask != "haar"]
CASES = [(protocol, QUICK[k % len(QUICK)]) for k, protocol in enumerate(TRAINED)]
# each mask, by default under a method that is quickly run
FEW = list(zip((FedAvg, CFL, IFCA), QUICK, strict=True))


@cache
def federation() -> Federation:
    """Return few clients of two clusters."""
    return two_clusters(CLIENTS, 24)


@cache
def achieved(protocol: Protocol, mask: str) -> dict[str, Finding]:
    """Return what every attack achieves on a small run, by its name."""
    fitted, taps = tapped(build(protocol, mask=mask, model="linear"), federation(), EXACT)
    found = {}
    for name in attack_names():
        attack = attack_named(name)
        own_rows = isinstance(attack, CanaryAudit) or attack.of_mechanism or attack.of_masks
        if not own_rows and not any(word in name for word in (*SLOW, *OF_AVERAGES)):
            found[name] = finding_of(attack, fitted, federation(), ADVERSARY, taps)
    return found


def check(protocol: Protocol, mask: str) -> None:
    """Check that each score of a masked run is that of the run without the mask."""
    for name, masked in achieved(protocol, mask).items():
        plain = achieved(protocol, "none")[name]
        assert not masked.failed, masked.trace
        if plain.score is None or masked.score is None:
            assert (plain.score, plain.reason) == (masked.score, masked.reason), name
        else:
            assert masked.score.value == pytest.approx(plain.score.value, abs=1e-6), name


@pytest.mark.parametrize(("protocol", "mask"), FEW)
def test_a_colluder_undoes_the_mask_for_every_attack(protocol: Protocol, mask: str) -> None:
    check(protocol, mask)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("protocol", "mask"), [case for case in CASES if case not in FEW])
def test_a_colluder_undoes_every_mask_of_every_protocol(protocol: Protocol, mask: str) -> None:
    check(protocol, mask)


def test_seals_are_opened_and_nothing_is_undone_without_a_colluder() -> None:
    found = {}
    for options in ({"sealed": False, "mask": "none"}, {"sealed": True}):
        protocol = build(OneShot, **options)
        fitted, taps = tapped(protocol, federation(), EXACT)
        attack = attack_named("subspace-composition")
        found[protocol.sealed] = finding_of(attack, fitted, federation(), ADVERSARY, taps).score
        alone = Adversary(("server",), (), "the server")
        found[protocol.sealed, "alone"] = finding_of(
            attack, fitted, federation(), alone, taps
        ).score
    assert found[True] == found[False] is not None
    assert found[True, "alone"] is None


def updates(colluders: int, **options: Any) -> Finding:
    """Return what label counts achieve on secure sums of four, some of whom collude."""
    four = Federation.simulate("digits", clients=4, samples=24, seed=0)
    clients = tuple(range(colluders))
    parties = ("server", *(client(number) for number in clients))
    fitted, taps = tapped(
        FedAvg(rounds=1, epochs=1, model="linear", aggregation="secagg", **options), four, EXACT
    )
    adversary = Adversary(parties, clients, "the server and clients")
    return finding_of(attack_named("label-counts"), fitted, four, adversary, taps)


@pytest.mark.parametrize("options", [{}, {"mask": "permutation"}, {"clip": 0.1}])
def test_all_but_one_subtract_themselves_from_a_secure_sum(options: dict[str, Any]) -> None:
    assert updates(1, **options).inapplicable
    found = updates(3, **options)
    assert found.guess is not None and list(found.guess.values) == [3]


@pytest.mark.always
def test_masks_themselves_are_attacked_as_they_are() -> None:
    names = [name for name in attack_names() if attack_named(name).of_masks]
    of_masks = ["mask-invariants", "mask-known-plaintext", "mask-public-model", "repeated-mask"]
    assert names == of_masks
    fitted, taps = tapped(build(CFL, mask="permutation", model="linear"), federation(), EXACT)
    attack = attack_named("mask-known-plaintext")
    found = finding_of(attack, fitted, federation(), ADVERSARY, taps)
    assert found.score is not None and found.score.value > 0.99

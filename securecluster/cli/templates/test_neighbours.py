"""The attack succeeds where single updates are seen, and has nothing to read in secure sums."""

from dataclasses import replace

from securecluster import LabelSwap
from securecluster.audits.claim_checks import check_claim
from securecluster.audits.claims import Claim

IN_SUMS = Claim(
    sentence="Secure sums hide whose updates are alike",
    source="this test",
    attack="securecluster.cli.templates.neighbours:Neighbours",
    protection={"aggregation": "secagg"},
    protocol="fedavg",
    clients=24,
    scenario=LabelSwap(clusters=2),
)


def test_secure_sums_hide_it() -> None:
    checked = check_claim(IN_SUMS)
    assert checked.holds, checked.failure


def test_a_mask_does_not() -> None:
    masked = replace(IN_SUMS, protection={"mask": "permutation"}, hidden=False)
    checked = check_claim(masked)
    assert checked.holds, checked.failure

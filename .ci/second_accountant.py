"""Hold the ε of ledgers to Google's dp-accounting, which knows nothing of this package.

python .ci/second_accountant.py FILE

FILE is what `.ci/ledgers.py` writes. It runs in an environment of its own: dp-accounting pins attrs
below what cattrs needs. From the events it makes its own history of each client, as
`securecluster.privacy.dp.ledger.Event` explains them, and prices the dearest by privacy loss
distributions, for a blanked unit and for a replaced one. It fails where a ledger claims less than
that, or far more.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

History = tuple[tuple[float, float, int], ...]  # (noise multiplier, sampling rate, times)
SHORT = 5e-4  # a ledger may claim this share less: both accountants round upwards
LONG = 1.05  # and this many times as much; the largest seen is 1.0023
INTERVAL = 1e-3  # of privacy losses; at 1e-4 the figures are the same to six digits
NEGLIGIBLE = 1e-15  # of a step's probability, beyond the largest privacy loss of a replaced unit
EXACT = (0.0, 1.0)


def histories(ledger: Mapping[str, Any], replaced: bool = False) -> set[History]:
    """Return what each client released, the same ones once; nothing of clients that released
    nothing.

    Where a unit is replaced, z is that of the larger sensitivity, but for sampled steps.
    """
    released = {i for event in ledger["events"] if not event["kept"] for i in event["ids"]}
    found: dict[int, Counter[tuple[float, float]]] = {}
    for event in ledger["events"]:
        for i in released.intersection(event["ids"]):
            for z, q, times in steps(event, ledger["samples"].get(str(i))):
                ratio = event["replace"] if replaced and q == 1 else 1
                found.setdefault(i, Counter())[z / ratio, q] += times
    return {tuple((z, q, times) for (z, q), times in sorted(own.items())) for own in found.values()}


def steps(event: Mapping[str, Any], samples: int | None) -> list[tuple[float, float, int]]:
    """Return what one event is for a client with so many samples.

    Raises:
        ValueError: a mechanism that is not known here.
    """
    mechanism, z = event["mechanism"], event["noise_multiplier"]
    if mechanism in ("free", "public"):
        return []
    if mechanism == "exact":
        return [(*EXACT, 1)]
    if mechanism == "gaussian":
        return [(z, 1.0, 1)]
    if mechanism == "skellam":
        # A Gaussian of the same variance costs less, by a few percent in large sums.
        norm, _ = event["sensitivities"]
        return [(math.sqrt(event["variance"]) / norm, 1.0, 1)]
    if mechanism != "dp-sgd" or samples is None:
        raise ValueError(f"no price for an event of {mechanism!r} with {samples} samples")
    batch, epochs = event["batch"], event["epochs"]
    if event.get("again") and batch is not None and batch < samples:
        return [(z, 1.0, 2 * epochs * math.ceil(samples / batch))]
    if batch is None or batch >= samples:
        return [(z, 1.0, epochs)]
    return [(z, batch / samples, epochs * math.ceil(samples / batch))]


@lru_cache(4096)
def epsilon(history: History, delta: float, renyi: bool = False) -> float:
    """Return ε at δ by privacy loss distributions, or by Rényi divergences of whole orders."""
    import dp_accounting
    from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
    from dp_accounting.rdp.rdp_privacy_accountant import RdpAccountant

    if any(z == 0 for z, _, _ in history):
        return math.inf
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = PLDAccountant(relation, value_discretization_interval=INTERVAL)
    if renyi:
        accountant = RdpAccountant(range(2, 257), relation)
    for z, q, times in history:
        event = dp_accounting.GaussianDpEvent(z)
        if q < 1:
            event = dp_accounting.PoissonSampledDpEvent(q, event)
        accountant.compose(event, times)
    return float(accountant.get_epsilon(delta))


def replaced_delta(z: float, q: float, epsilon: float) -> float:
    """Return δ(ε) of a sampled step in which an example is replaced, in closed form.

    Both examples are in the batch at the same time, with rows 1 and −1: P = (1 − q)N(0, z²) +
    qN(1, z²) against Q, its mirror image. P/Q grows with x, so the test is a half-line.
    """
    from scipy.optimize import brentq
    from scipy.special import ndtr

    def excess(x: float) -> float:
        one = math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * z * z)
        other = math.log1p(-q), math.log(q) - (2 * x + 1) / (2 * z * z)
        ratios = [max(two) + math.log1p(math.exp(-abs(two[0] - two[1]))) for two in (one, other)]
        return ratios[0] - ratios[1] - epsilon

    reach = 10 + 2 * z * z * (abs(epsilon) - math.log(q))
    start = brentq(excess, -reach, reach, xtol=1e-13)
    none = (1 - q) * ndtr(-start / z)
    one, other = (none + q * ndtr((c - start) / z) for c in (1, -1))
    return float(max(0.0, one - math.exp(epsilon) * other))


@lru_cache(4096)
def replaced_epsilon(history: History, delta: float) -> float:
    """Return ε at δ where an example is replaced, by connected dots of δ(ε)."""
    import numpy as np
    from dp_accounting.pld import pld_pmf
    from dp_accounting.pld.privacy_loss_distribution import (
        PrivacyLossDistribution,
        from_gaussian_mechanism,
    )

    total = None
    for z, q, times in history:
        if q == 1:
            one = from_gaussian_mechanism(z, value_discretization_interval=INTERVAL)
        else:
            largest = 1.0
            while replaced_delta(z, q, largest) > NEGLIGIBLE:
                largest *= 1.2
            count = math.ceil(largest / INTERVAL)
            dots = np.arange(-count, count + 1)
            deltas = np.array([replaced_delta(z, q, k * INTERVAL) for k in dots])
            pmf = pld_pmf.create_pmf_pessimistic_connect_dots(INTERVAL, dots, deltas)
            one = PrivacyLossDistribution(pmf)
        composed = one.self_compose(times)
        total = composed if total is None else total.compose(composed)
    return 0.0 if total is None else float(total.get_epsilon_for_delta(delta))


def price(ledger: Mapping[str, Any], replaced: bool = False) -> float:
    """Return ε of the client that released most.

    The bound of Skellam noise is one of Rényi divergences, so its ledgers are held to these.
    """
    own = histories(ledger, replaced)
    delta = ledger["delta"]
    if any((z, q) == EXACT for history in own for z, q, _ in history):
        return math.inf
    if replaced and any(q < 1 for history in own for _, q, _ in history):
        return max(replaced_epsilon(history, delta) for history in own)
    renyi = any(event["mechanism"] == "skellam" for event in ledger["events"])
    return max((epsilon(history, delta, renyi) for history in own), default=0.0)


def verdict(claimed: float, found: float) -> str:
    """Return what is wrong with a claim, or nothing."""
    if claimed == found:
        return ""
    if not claimed >= found * (1 - SHORT):
        return "TOO LOW"
    return "" if claimed <= found * LONG else "TOO HIGH"


def main(source: Path) -> int:
    """Print both figures of every ledger, and return how many claims are wrong."""
    wrong = 0
    for ledger in json.loads(source.read_text()):
        for name, claimed in (("", "epsilon"), (", replaced", "epsilon_replace")):
            found = price(ledger, replaced=bool(name))
            fault = verdict(ledger[claimed], found)
            wrong += bool(fault)
            print(
                f"{ledger['run'] + name:44s} ledger {ledger[claimed]:9.4f}   "
                f"dp-accounting {found:9.4f}   {fault}",
                flush=True,
            )
    print(f"{wrong} claim(s) wrong" if wrong else "every claim holds")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

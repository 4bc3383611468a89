"""Hold the sentence after a private run to what happened.

python -m benchmarks.private.words

Ten runs on digits under differential privacy: five in which the true clusters are found, and five
in which they are not, by construction for one reason each: noise, too few samples, or that there
are no clusters (whose truth is kept from the run, which would else know). The sentence that the run
ends with should name that reason, and no reason where clusters were found.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.grid import parser_of, read_options
from benchmarks.sheet import Cell, Sheet
from benchmarks.table import RESULTS, SEEDED
from securecluster import Federation
from securecluster.data.scenarios import scenario
from securecluster.errors import SecureClusterWarning
from securecluster.protocols.registry import protocol_class

FOUND, NOISE, SAMPLES, NONE = "found", "noise", "too few samples", "no clusters"
# parts of sentences that name a reason, the first that is there
REASONS = {
    "likeliest reason, since the power check took clusters for lost": NOISE,
    "of noise alone": NOISE,
    "likeliest reason, since the power check took training for lost": NOISE,
    "too few samples are the likeliest reason": SAMPLES,
    "most likely there are no other clusters": NONE,
}
FIRST_SEED = 77
EXAMPLE = {"dp_unit": "example"}
SHORT = {"rounds": 10, "epochs": 1, "model": "linear"}
LONGER = {"rounds": 12, "pre_rounds": 5, "model": "linear"}


@dataclass(frozen=True)
class Case:
    """A run, and what it should end with.

    Attributes:
        expected: what happens, or the reason why no clusters are found.
        protocol: its name.
        clients: how many.
        samples: of each.
        options: of the protocol.
    """

    expected: str
    protocol: str
    clients: int
    samples: int
    options: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case(FOUND, "flhc", 16, 80, {**EXAMPLE, "target_epsilon": 16.0}),
    Case(FOUND, "cfl", 16, 80, {**EXAMPLE, "target_epsilon": 32.0}),
    Case(FOUND, "signature", 16, 80, {**EXAMPLE, "target_epsilon": 8.0, "k": 4, **SHORT}),
    Case(FOUND, "hidden", 20, 60, {"target_epsilon": 200.0, "k": 4, **SHORT}),
    Case(FOUND, "srfca", 12, 80, {**EXAMPLE, "target_epsilon": 2000.0, **SHORT}),
    Case(NOISE, "flhc", 16, 60, {"target_epsilon": 8.0, **LONGER}),
    Case(NOISE, "cfl", 16, 60, {"clip": 1.0, "noise": 1.0, **SHORT}),
    Case(SAMPLES, "flhc", 48, 12, {**EXAMPLE, "clip": 1.0, "noise": 0.05, **LONGER}),
    Case(NONE, "flhc", 16, 85, {**EXAMPLE, "target_epsilon": 64.0, **LONGER}),
    Case(NONE, "cfl", 16, 85, {**EXAMPLE, "target_epsilon": 64.0, "rounds": 12}),
)


def cells() -> list[Cell]:
    """Return a cell for each case."""
    return [
        {"case": number, "protocol": case.protocol, "expected": case.expected}
        for number, case in enumerate(CASES)
    ]


def measure(cell: Cell) -> dict[str, Any]:
    """Run a case.

    Args:
        cell: of `cells`.

    Returns:
        ARI with the true clusters, the sentence, and the reason that it names.
    """
    case = CASES[cell["case"]]
    kinds = scenario("iid") if case.expected == NONE else scenario("label-swap", 4)
    federation = Federation.simulate(
        "digits",
        scenario=kinds,
        clients=case.clients,
        samples=case.samples,
        seed=FIRST_SEED + cell["case"],
    )
    if case.expected == NONE:
        federation = replace(federation, truth=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureClusterWarning)
        fitted = protocol_class(case.protocol)(**case.options).fit(federation, SEEDED)
    said = fitted.warning_ or ""
    agreement = fitted.agreement_
    power = fitted.kept_.learned.power or {}
    named = next((reason for fragment, reason in REASONS.items() if fragment in said), "")
    return {
        "ari": None if agreement is None else agreement["ari"],
        "clusters": len(set(fitted.labels_.tolist())),
        "power": power.get("clusters"),
        "named": named or "nothing",
        "right": named == ("" if case.expected == FOUND else case.expected),
        "sentence": said,
    }


def main(argv: Sequence[str] | None = None) -> Path:
    """Run what is missing, and print how many sentences are right."""
    chosen = read_options(parser_of(__doc__, seeds=1), argv)
    sheet = Sheet("words", RESULTS)
    rows = sheet.fill(cells(), measure, chosen.minutes)
    done = [row for row in rows if row["status"] == "done"]
    right = sum(row["right"] == "True" for row in done)
    print(f"{right} of {len(done)} sentences are right")
    return sheet.path


if __name__ == "__main__":
    print(main())

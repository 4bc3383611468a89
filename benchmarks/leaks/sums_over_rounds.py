"""What an honest server solves for by the sums of a run, by protocol, participation and cohorts.

python -m benchmarks.leaks.sums_over_rounds [--seeds 5] [--minutes 60]
    [--cohorts without with] [--subjects hidden ifca …]

20 clients of digits, a softmax regression, secure sums. A cell is one of the attacks
`sums-over-rounds-…` on one run: all clients in every round, half of them, or all with a tenth of
the replies lost. Clusters are guessed where a protocol hides them, on four clusters that swap
labels; label counts and numbers of samples on clients of Dirichlet labels (α = 0.5) that have 20 to
35 samples each. Without a mask except where a subject says so: a fresh permutation in each round
leaves nothing in the last bias.

`with` has fixed cohorts of five clients, and `without` has none, by the option `cohort_size`; where
protocols have no such option, cells with cohorts are left out, and the script says so. It measures
what is missing, so that the same command adds what was left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.grid import Grid, parser_of, read_options
from benchmarks.leaks.attacks import score_columns
from benchmarks.sheet import Cell
from benchmarks.table import RESULTS
from securecluster import Dirichlet, Federation, LabelSwap
from securecluster.attacks.experiments import tapped
from securecluster.attacks.registry import attack_named
from securecluster.attacks.scoring import BETTER, evaluate
from securecluster.attacks.sums_over_rounds import SumsOverRounds
from securecluster.attacks.views import knowledge_of, truth_of, view_of
from securecluster.protocols import Settings
from securecluster.protocols.registry import protocol_class

CLIENTS = 20
SAMPLES = {"swapped": 40, "skewed": 35}
FEWEST = 20  # samples of a client of the scene "skewed"
OPTION = "cohort_size"
# the values of the option, by the column `cohorts`
COHORTS = {"without": 0, "with": 5}
CLUSTERS = "sums-over-rounds-clusters"
OF_DATA = ("sums-over-rounds-labels", "sums-over-rounds-sizes")


@dataclass(frozen=True)
class Setting:
    """Participation in the rounds of a run.

    Args:
        participation: share of the clients of a round.
        lost: share of the replies that are lost.
        rounds: of the run, if a subject has no other number.
    """

    participation: float
    lost: float
    rounds: int


# Over the same clients in every round, more rounds change nothing.
PARTICIPATION = {
    "1": Setting(1.0, 0.0, 3),
    "0.5": Setting(0.5, 0.0, 30),
    "1, a tenth lost": Setting(1.0, 0.1, 30),
}


@dataclass(frozen=True)
class Subject:
    """A protocol with secure sums.

    Args:
        protocol: its name.
        options: besides those that all subjects have.
        attacks: that are made.
        scene: of the clients' data.
        seeds: how many at most.
        factor: of the number of rounds.
    """

    protocol: str
    options: Mapping[str, Any] = field(default_factory=dict)
    attacks: tuple[str, ...] = OF_DATA
    scene: str = "skewed"
    seeds: int = 2
    factor: int = 1


FOUND_BY_CLIENTS: dict[str, Any] = {"attacks": (CLUSTERS,), "scene": "swapped"}
PERMUTED: dict[str, Any] = {"mask": "permutation"}
# what hidden and IFCA sum by cluster only where they are asked to, so that cohorts protect alone
EXACT: dict[str, Any] = {"k": 4, "exact_weights": True}
SUBJECTS = {
    # clusters that only clients know
    "hidden": Subject("hidden", {**EXACT, **PERMUTED}, seeds=5, **FOUND_BY_CLIENTS),
    "hidden, clipped": Subject("hidden", {"k": 4, "clip": 1.0, **PERMUTED}, **FOUND_BY_CLIENTS),
    "ifca": Subject("ifca", {**EXACT, "starts": 1, **PERMUTED}, seeds=5, **FOUND_BY_CLIENTS),
    # label counts and numbers of samples
    "fedavg": Subject("fedavg", seeds=5, factor=2),
    "fedavg, permuted": Subject("fedavg", PERMUTED, factor=2),
    "finetune": Subject("finetune", {"tune_rounds": 1}),
    "mrmtl": Subject("mrmtl"),
    "hidden, no mask": Subject("hidden", EXACT),
    "ifca, no mask": Subject("ifca", {**EXACT, "starts": 1}),
    "cfl, sketches": Subject("cfl", {"sketch": 64}),
    "flhc, sketches": Subject("flhc", {"sketch": 64, "pre_rounds": 2}),
    "srfca": Subject("srfca", {"relevance": "pads", "sealed": True, "local_rounds": 1}),
    "oneshot": Subject("oneshot", {"tasks": 2, "relevance": "pads", "sealed": True}),
    "pacfl": Subject("pacfl", {"k": 2}),
    "signature": Subject("signature", {"k": 2}),
    "random": Subject("random", {"k": 2}),
    "local-kmeans": Subject("local-kmeans", {"k": 2, "local_rounds": 1}),
}


def has_cohorts(subject: Subject) -> bool:
    """Return whether a subject's protocol has the option of fixed cohorts.

    Args:
        subject: one of `SUBJECTS`.
    """
    return OPTION in protocol_class(subject.protocol)().get_params()


def protocol_of(subject: Subject, setting: Setting, cohorts: str) -> Any:
    """Return the protocol of a run.

    Args:
        subject: one of `SUBJECTS`.
        setting: one of `PARTICIPATION`.
        cohorts: "with" or "without".
    """
    params: dict[str, Any] = {
        "rounds": setting.rounds * subject.factor,
        "participation": setting.participation,
        "model": "linear",
        "mask": "none",
        "aggregation": "secagg",
        **subject.options,
    }
    if has_cohorts(subject):
        params[OPTION] = COHORTS[cohorts]
    return protocol_class(subject.protocol)(**params)


# one entry is enough: the cells of one run are measured in succession
@lru_cache(maxsize=1)
def federation_of(scene: str, seed: int) -> Federation:
    """Return the clients of a run.

    Args:
        scene: "swapped" or "skewed".
        seed: of every draw.
    """
    scenario: Any = Dirichlet(alpha=0.5)
    if scene == "swapped":
        scenario = LabelSwap(clusters=4)
    maximum = SAMPLES[scene]
    federation = Federation.simulate(
        "digits", scenario=scenario, clients=CLIENTS, samples=maximum, seed=seed
    )
    if scene == "swapped":
        return federation
    shards = []
    for client, shard in enumerate(federation.shards):
        more = client * (maximum - FEWEST) // (CLIENTS - 1)
        count = FEWEST + more
        held = len(shard.y)
        # spread over the samples, which may be in the order of their labels
        chosen = [k * held // count for k in range(count)]
        shards.append(replace(shard, x=shard.x[chosen], y=shard.y[chosen]))
    return replace(federation, shards=tuple(shards), recipe=None)


@lru_cache(maxsize=1)
def run_of(subject: str, participation: str, cohorts: str, seed: int) -> Any:
    """Return what the server of a run observed and knows, and the truth.

    Args:
        subject: a name of `SUBJECTS`.
        participation: a name of `PARTICIPATION`.
        cohorts: "with" or "without".
        seed: of the data and the run.
    """
    chosen = SUBJECTS[subject]
    setting = PARTICIPATION[participation]
    settings = Settings(transcript="full", threads=1, dropout=setting.lost)
    federation = federation_of(chosen.scene, seed)
    protocol = protocol_of(chosen, setting, cohorts)
    fitted, taps = tapped(protocol, federation, settings)
    # one view of all attacks on a run, since its sums take a replay
    view = view_of(fitted)
    return view, knowledge_of(fitted), truth_of(fitted, federation, view, taps)


def cells(
    seeds: int, cohorts: Sequence[str] = tuple(COHORTS), subjects: Sequence[str] = tuple(SUBJECTS)
) -> list[Cell]:
    """Return all cells that protocols can run, those of one run after each other.

    Args:
        seeds: how many at most, from 0 on.
        cohorts: of "with" and "without".
        subjects: names of `SUBJECTS`.
    """
    grid: list[Cell] = []
    for name in subjects:
        subject = SUBJECTS[name]
        possible = list(cohorts)
        if not has_cohorts(subject):
            possible = [one for one in cohorts if one != "with"]
        for participation in PARTICIPATION:
            for one in possible:
                for seed in range(min(seeds, subject.seeds)):
                    for attack in subject.attacks:
                        grid.append(
                            {
                                "subject": name,
                                "participation": participation,
                                "cohorts": one,
                                "attack": attack,
                                "seed": seed,
                            }
                        )
    return grid


def measure(cell: Cell) -> dict[str, Any]:
    """Attack one run.

    Args:
        cell: one of `cells`.
    """
    run = (cell["subject"], cell["participation"], cell["cohorts"], cell["seed"])
    view, knowledge, truth = run_of(*run)
    attack = attack_named(cell["attack"])
    assert isinstance(attack, SumsOverRounds)
    results: dict[str, Any] = {"sums": 0, "rank": 0, "solvable": 0}
    systems = attack.systems(view, knowledge)
    if systems:
        longest = max(systems, key=lambda sums: sums.rank)
        results["sums"] = len(longest.members)
        results["rank"] = longest.rank
        results["solvable"] = len(longest.solvable)
    finding = evaluate(attack, view, knowledge, truth)
    if isinstance(finding, str):
        return {**results, "verdict": "", "reason": finding, "beaten": False}
    results["metric"] = finding.metric
    results |= score_columns(finding)
    results["verdict"] = finding.verdict
    results["beaten"] = finding.verdict == BETTER
    return results


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing.

    Args:
        argv: the arguments; those of the command line by default.
    """
    parser = parser_of(__doc__, seeds=5, minutes=60.0)
    parser.add_argument("--cohorts", nargs="+", choices=tuple(COHORTS), default=tuple(COHORTS))
    parser.add_argument("--subjects", nargs="+", choices=tuple(SUBJECTS), default=tuple(SUBJECTS))
    chosen = read_options(parser, argv)
    without = [name for name in chosen.subjects if not has_cohorts(SUBJECTS[name])]
    if without and "with" in chosen.cohorts:
        names = ", ".join(without)
        print(f"left out with cohorts, since there is no option {OPTION}: {names}")
    grid = Grid(
        __doc__,
        "sums_over_rounds",
        lambda scale, seeds: cells(seeds, chosen.cohorts, chosen.subjects),
        measure,
        folder=RESULTS,
        # rows are in the order of the subjects, and a run that is cut off has whole seeds of them
        measurable=lambda requested: sorted(requested, key=itemgetter("seed")),
    )
    return grid.run(chosen)


if __name__ == "__main__":
    print(main())

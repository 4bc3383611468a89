"""How often clients of one adversary are alone with an honest one in a secure sum, by protocol.

python -m benchmarks.leaks.sybils [--seeds 5] [--minutes 60]

16 clients of digits in four true clusters that swap labels, 40 samples each, a softmax regression,
secure sums, no mask (clients undo it). `securecluster.attacks.sybils` says what the Sybils do:
those that mimic are strangers, of other true clusters than their victim, and those that are honest
are its true companions. The server is honest; `droppable` is whether it could have left the victim
alone with them by calling others lost. With two members more than Sybils, `least` ends all of it by
construction, which tests/attacks/test_sybils.py shows; of the attacks the default is measured.

Rows without Sybils are honest runs: how many clients are in sums of two by themselves, and what a
larger least number of members costs. `least` is the option `least_members`; of `ifca`, whose sums
are over all clients and have a block for each model, it is `least_choosers` where there is such an
option, and else only the default is measured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from benchmarks.grid import Grid, with_seeds
from benchmarks.sheet import Cell
from benchmarks.table import RESULTS
from securecluster import Federation
from securecluster.attacks.sybils import BEHAVIOURS, isolation, run_with_sybils
from securecluster.clustering.metrics import agreement, mean
from securecluster.data.scenarios import LabelSwap
from securecluster.errors import SecureClusterError, SecureClusterWarning
from securecluster.protections.registry import sum_plan_of
from securecluster.protocols import CFL, FLHC, IFCA, SRFCA, ClusteringProtocol, Settings, Signature

CLIENTS = 16
SAMPLES = 40
NONE = "none"
SHARED: dict[str, Any] = {"model": "linear", "mask": "none", "aggregation": "secagg"}
SKETCHED: dict[str, Any] = {**SHARED, "sketch": 64, "rounds": 10}
PAIRED: dict[str, Any] = {**SHARED, "relevance": "pads", "sealed": True}
ABSOLUTE: dict[str, Any] = {"criterion": "absolute", "eps1": 100.0, "eps2": 1e-6, "gamma_max": 0.0}
PROTOCOLS: dict[str, Callable[..., ClusteringProtocol]] = {
    "cfl": partial(CFL, **SKETCHED),
    "cfl absolute": partial(CFL, **SKETCHED, **ABSOLUTE),
    "flhc": partial(FLHC, **SKETCHED, pre_rounds=3),
    "srfca": partial(SRFCA, **PAIRED, rounds=6, local_rounds=12),
    "ifca": partial(IFCA, **SHARED, rounds=8, k=5, starts=1),
    "signature": partial(Signature, **SHARED, rounds=8),
}
HONEST = ("cfl absolute",)  # measured without Sybils only
SYBILS = (1, 2, 3)
COSTS = (2, 3, 5)
DEFAULT = 2


def option_of(protocol: str) -> str | None:
    """Return the name of the option that `least` is of; None where there is none."""
    name = "least_choosers" if protocol == "ifca" else "least_members"
    return name if name in PROTOCOLS[protocol]().get_params() else None


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return honest runs for each least number of members, and attacked ones for the default.

    Args:
        scale: there is one.
        seeds: how many, from 0 on.
    """
    settings: list[Cell] = []
    for protocol in PROTOCOLS:
        case: Cell = {"protocol": protocol}
        for minimum in COSTS if option_of(protocol) else (DEFAULT,):
            settings.append({**case, "behaviour": NONE, "sybils": 0, "least": minimum})
        if protocol in HONEST:
            continue
        for behaviour, mimicry in BEHAVIOURS.items():
            # companions that are honest are alone with their victim only if they are all of them
            counts = (max(SYBILS),) if mimicry.mimic is None else SYBILS
            for sybils in counts:
                attacked: Cell = {**case, "behaviour": behaviour, "sybils": sybils}
                settings.append({**attacked, "least": DEFAULT})
    return with_seeds(settings, range(seeds))


# one entry is enough: the cells of one seed are measured in succession
@lru_cache(maxsize=1)
def federation_of(seed: int) -> Federation:
    """Return the clients.

    Args:
        seed: of every draw.
    """
    scenario = LabelSwap(clusters=4)
    return Federation.simulate(
        "digits", scenario=scenario, clients=CLIENTS, samples=SAMPLES, seed=seed
    )


def chosen(truth: Sequence[int], behaviour: str, sybils: int, seed: int) -> tuple[int, list[int]]:
    """Return a random victim and its Sybils: companions that are honest, or strangers that mimic.

    Args:
        truth: true cluster of each client.
        behaviour: of the Sybils.
        sybils: how many.
        seed: of the choice.
    """
    draw = np.random.default_rng(seed)
    victim = int(draw.integers(len(truth)))
    alike = BEHAVIOURS[behaviour].mimic is None
    possible = []
    for client, cluster in enumerate(truth):
        if client != victim and (cluster == truth[victim]) is alike:
            possible.append(client)
    return victim, sorted(draw.permutation(possible)[:sybils].tolist())


def measure(cell: Cell) -> Mapping[str, Any]:
    """Run one protocol with Sybils, or with none.

    Args:
        cell: one of `cells`.

    Returns:
        The fields of `Isolation`; of honest clients accuracy, agreement with the true clusters and
        how many trained alone; and `stopped`, the error that ended the run, or "".
    """
    seed = cell["seed"]
    federation = federation_of(seed)
    assert federation.truth is not None
    truth = list(federation.truth)
    name = option_of(cell["protocol"])
    options = {name: cell["least"]} if name else {}
    protocol = PROTOCOLS[cell["protocol"]](**options)
    behaviour = cell["behaviour"] if cell["sybils"] else "honest"
    victim, sybils = chosen(truth, behaviour, cell["sybils"], seed)
    settings = Settings(threads=1, keys_from_seed=True)
    with warnings.catch_warnings():
        # of clusters that are guessed, and models at chance
        warnings.simplefilter("ignore", SecureClusterWarning)
        try:
            run = run_with_sybils(protocol, federation, behaviour, victim, sybils, settings)
        except SecureClusterError as error:
            return {"stopped": str(error)}
        outcome = isolation(run, sum_plan_of(run.fitted.kept_.learned.config).least_survivors)
    honest = [client for client in range(CLIENTS) if client not in run.sybils]
    labels = run.fitted.labels_
    return {
        "isolated": outcome.isolated,
        "rounds": outcome.rounds,
        "error": outcome.error,
        "droppable": outcome.droppable,
        "pairs": outcome.pairs,
        "accuracy": mean(np.asarray(run.fitted.scores_)[honest]),
        "ari": agreement([int(labels[i]) for i in honest], [truth[i] for i in honest])["ari"],
        "alone": len(set(run.fitted.kept_.learned.local) & set(honest)),
        "stopped": "",
    }


GRID = Grid(
    __doc__,
    "sybils",
    cells,
    measure,
    by=["protocol", "behaviour", "sybils", "least"],
    values=["isolated", "error", "droppable", "pairs", "accuracy", "ari", "alone"],
    seeds=5,
    minutes=60.0,
    folder=RESULTS,
)


def main(argv: Sequence[str] | None = None) -> Any:
    """Measure what is missing, and print.

    Args:
        argv: the arguments; those of the command line by default.
    """
    return GRID.main(argv)


if __name__ == "__main__":
    print(main())

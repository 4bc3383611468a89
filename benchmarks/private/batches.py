"""Compare expected batch sizes of DP-SGD at equal ε: accuracy and processor seconds.

python -m benchmarks.private.batches [--seeds 5] [--minutes 60]

A setting names a protocol and its clients, in four clusters whose labels are swapped; FEMNIST's
clients are its writers. All options but the batch and the learning rate are those of
`--dp-unit example --target-epsilon`. The batch is 20, or a quarter of a client's samples; all of
them are tried in the tuning alone.

The learning rate is 0.2 with 20 images, the usual one, and otherwise times the root of the batches'
ratio, as `target_defaults` has it, and at ε = 4 times this ratio or its half. Or it is `tuned`: of
three rates for each batch, 0.2 times the ratio, half and twice that, the best at ε = 4 on another
seed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.grid import parser_of, product, read_options, with_seeds
from benchmarks.sheet import DONE, Cell, Row, Sheet
from benchmarks.table import RESULTS, SEEDED, write
from securecluster import Federation
from securecluster.core.devices import cpu_threads
from securecluster.data.scenarios import scenario
from securecluster.protocols.registry import protocol_class

TUNED = 4.0  # ε at which learning rates are compared
EPSILONS = (TUNED, 1.0, 8.0)
TUNING_SEED = 8100
FIRST_SEED = 8200
USUAL = 20  # batch size without noise
RATE = 0.2  # learning rate of images with this batch
FACTORS = (0.5, 1.0, 2.0)
ALL = "all"
COMPARED = ("20", "quarter")
ROOT = "root"
# of a larger batch over the usual one: its learning rate over the usual one
SCALES: Mapping[str, Callable[[float], float]] = {
    ROOT: math.sqrt,
    "ratio": lambda ratio: ratio,
    "half": lambda ratio: ratio / 2,
}


@dataclass(frozen=True)
class Clients:
    """Clients of a setting.

    Attributes:
        data: a data set.
        scenario: how clusters differ, or "natural" for a data set with clients of its own.
        clients: how many.
        samples: of each.
        protocols: what they run.
    """

    data: str
    scenario: str
    clients: int
    samples: int
    protocols: tuple[str, ...] = ("fedavg", "signature", "cfl")


SETTINGS: Mapping[str, Clients] = {
    "digits": Clients("digits", "label-swap", 8, 150),
    "mnist14": Clients("mnist14", "label-swap", 16, 300),
    "fashion": Clients("fashion_mnist", "label-swap", 16, 300, ("fedavg", "signature")),
    "femnist14": Clients("femnist14", "natural", 16, 100, ("fedavg", "signature")),
}


def batches_of(clients: Clients) -> dict[str, int]:
    """Return the batch sizes by name.

    Args:
        clients: of a setting.
    """
    return {"20": USUAL, "quarter": clients.samples // 4, ALL: clients.samples}


def rates_of(batch: int) -> list[float]:
    """Return the learning rates of a batch size.

    Args:
        batch: expected number of samples.
    """
    return [float(f"{RATE * batch / USUAL * factor:.3g}") for factor in FACTORS]


def tuning_cells() -> list[Cell]:
    """Return setting by protocol by batch by learning rate, on the seed for it."""
    settings: list[Cell] = []
    for name, clients in SETTINGS.items():
        for batch, size in batches_of(clients).items():
            settings += product(
                setting=[name],
                protocol=clients.protocols,
                epsilon=[TUNED],
                batch=[batch],
                lr=rates_of(size),
            )
    return with_seeds(settings, [TUNING_SEED])


def plans(tuned: Sequence[Row]) -> dict[str, dict[tuple[str, str, str], float]]:
    """Return learning rates by setting, protocol and batch, by the way in which they are chosen.

    Args:
        tuned: rows of `tuning_cells`.
    """
    best: dict[tuple[str, str, str], Row] = {}
    for row in tuned:
        key = (row["setting"], row["protocol"], row["batch"])
        if key not in best or float(row["accuracy"]) > float(best[key]["accuracy"]):
            best[key] = row
    rates = {key: float(row["lr"]) for key, row in best.items() if key[2] in COMPARED}
    chosen = {"tuned": rates}
    for name, scale in SCALES.items():
        rates = chosen[name] = {}
        for setting, clients in SETTINGS.items():
            if clients.scenario == "natural":  # of bright images, with another usual rate
                continue
            for protocol in clients.protocols:
                ratio = clients.samples // 4 / USUAL
                rates[setting, protocol, "20"] = RATE
                rates[setting, protocol, "quarter"] = float(f"{RATE * scale(ratio):.3g}")
    return chosen


def cells(chosen: Mapping[str, Mapping[tuple[str, str, str], float]], seeds: int) -> list[Cell]:
    """Return setting by protocol by ε by batch and learning rate by seed, each once.

    Args:
        chosen: what `plans` returned.
        seeds: how many.
    """
    names = ("epsilon", "setting", "protocol", "batch", "lr")
    settings = dict.fromkeys(
        (epsilon, *key, lr)
        for epsilon in EPSILONS
        for way, rates in chosen.items()
        for key, lr in rates.items()
        if epsilon == TUNED or (way == ROOT and key[1] != "cfl")  # whose runs take longest
    )
    grid: list[Cell] = [dict(zip(names, values, strict=True)) for values in settings]
    return with_seeds(grid, range(FIRST_SEED, FIRST_SEED + seeds))


@lru_cache(maxsize=4)
def federation_of(setting: str, seed: int) -> Federation:
    """Return the clients of a setting.

    Args:
        setting: its name.
        seed: of the federation.
    """
    clients = SETTINGS[setting]
    clusters = None if clients.scenario == "natural" else 4
    return Federation.simulate(
        clients.data,
        scenario=scenario(clients.scenario, clusters),
        clients=clients.clients,
        samples=clients.samples,
        seed=seed,
    )


def measure(cell: Cell) -> dict[str, Any]:
    """Run a setting with a batch size and a learning rate.

    Args:
        cell: one of `cells` or `tuning_cells`.

    Returns:
        Mean accuracy of clients, ARI, processor seconds, noise multiplier and network.
    """
    federation = federation_of(cell["setting"], cell["seed"])
    size = batches_of(SETTINGS[cell["setting"]])[cell["batch"]]
    method = protocol_class(cell["protocol"])(
        dp_unit="example", target_epsilon=cell["epsilon"], batch_size=size, lr=cell["lr"]
    )
    start = time.process_time()
    fitted = method.fit(federation, SEEDED)
    processor = time.process_time() - start
    config = fitted.kept_.learned.config
    return {
        "accuracy": float(np.nanmean(fitted.scores_)),
        "ari": None if fitted.agreement_ is None else fitted.agreement_["ari"],
        "processor": f"{processor:.2f}",
        "noise": float(config["noise"]),
        "model": config["model"],
    }


def compared(
    rows: Sequence[Row], chosen: Mapping[str, Mapping[tuple[str, str, str], float]]
) -> list[dict[str, Any]]:
    """Return the larger batch beside the usual one, in pairs of one federation.

    Args:
        rows: of `cells`.
        chosen: what `plans` returned.
    """
    done = {
        tuple(row[name] for name in ("epsilon", "setting", "protocol", "batch", "lr", "seed")): row
        for row in rows
        if row["status"] == DONE
    }
    seeds = sorted({key[-1] for key in done})
    lines = []
    for way, rates in chosen.items():
        for epsilon in sorted(EPSILONS):
            for setting, protocol, batch in rates:
                if batch != COMPARED[0]:
                    continue
                runs = [
                    [
                        done.get((f"{epsilon:g}", setting, protocol, size, f"{lr:g}", seed))
                        for size in COMPARED
                        for lr in [rates[setting, protocol, size]]
                    ]
                    for seed in seeds
                ]
                pairs = [(one, other) for one, other in runs if one and other]
                if pairs:
                    line = {"rates": way, "epsilon": epsilon, "setting": setting}
                    lines.append({**line, "protocol": protocol, **_means(pairs)})
    return lines


def _means(pairs: Sequence[tuple[Row, Row]]) -> dict[str, Any]:
    """Return means over runs with the usual batch and with the larger one, and leads.

    Args:
        pairs: of one federation each.
    """
    means: dict[str, Any] = {}
    for name in ("accuracy", "ari", "processor"):
        usual = [float(row[name] or "nan") for row, _ in pairs]
        larger = [float(row[name] or "nan") for _, row in pairs]
        means |= {name: f"{fmean(usual):.4f}", f"{name}_larger": f"{fmean(larger):.4f}"}
        if name == "accuracy":
            leads = np.subtract(larger, usual)
            means |= {"lead": f"{leads.mean():.4f}", "better": int((leads > 0).sum())}
    return {**means, "seeds": len(pairs)}


def main(argv: Sequence[str] | None = None) -> Path:
    """Run what is missing, and write means over seeds."""
    options = read_options(parser_of(__doc__, seeds=5, minutes=60.0), argv)
    sheet = Sheet("batches_runs", RESULTS)
    end = time.monotonic() + 60 * options.minutes
    with cpu_threads(1):
        chosen = plans(sheet.fill(tuning_cells(), measure, options.minutes))
        minutes = max(0.0, (end - time.monotonic()) / 60)
        rows = sheet.fill(cells(chosen, options.seeds), measure, minutes)
    return write("batches", compared(rows, chosen))


if __name__ == "__main__":
    print(main())

"""Compare expected batch sizes of DP-SGD at equal ε: accuracy and processor seconds.

python -m benchmarks.private.batches [--seeds 5] [--minutes 60]

A setting names a protocol and its clients, in four clusters whose labels are swapped; FEMNIST's
clients are its writers. All options but the batch and the learning rate are those of
`--dp-unit example --target-epsilon`. The batch is 20, or a quarter of a client's samples; all of
them are tried on the seed for learning rates alone. The learning rate is one of three: that of a
batch of 20 images (0.2) times the batch over 20, the half of it, and twice as much. Which, is
decided for each setting and batch by the accuracy at ε = 4 on a seed of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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
    return {"20": USUAL, "quarter": clients.samples // 4, "all": clients.samples}


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


def cells(tuned: Sequence[Row], seeds: int) -> list[Cell]:
    """Return setting by protocol by ε by batch by seed, with the best learning rate of each.

    Args:
        tuned: rows of `tuning_cells`.
        seeds: how many.
    """
    best: dict[tuple[str, str, str], Row] = {}
    for row in tuned:
        key = (row["setting"], row["protocol"], row["batch"])
        if key not in best or float(row["accuracy"]) > float(best[key]["accuracy"]):
            best[key] = row
    grid: list[Cell] = []
    for epsilon in EPSILONS:
        settings = [
            {
                "setting": setting,
                "protocol": protocol,
                "epsilon": epsilon,
                "batch": batch,
                "lr": float(row["lr"]),
            }
            for (setting, protocol, batch), row in best.items()
            if batch != "all"
        ]
        grid += with_seeds(settings, range(FIRST_SEED, FIRST_SEED + seeds))
    return grid


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


def compared(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return means over seeds, and how far each batch is from the usual one in pairs of a seed.

    Args:
        rows: of `cells`.
    """
    done = [row for row in rows if row["status"] == DONE]
    by_cell = {
        (row["setting"], row["protocol"], row["epsilon"], row["batch"], row["seed"]): row
        for row in done
    }
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for (*group, _), row in by_cell.items():
        groups.setdefault((group[0], group[1], group[2], group[3]), []).append(row)
    lines = []
    for (setting, protocol, epsilon, batch), of_group in groups.items():
        usual = [
            by_cell.get((setting, protocol, epsilon, str(USUAL), row["seed"])) for row in of_group
        ]
        pairs = [(row, other) for row, other in zip(of_group, usual, strict=True) if other]
        leads = [float(row["accuracy"]) - float(other["accuracy"]) for row, other in pairs]
        lines.append(
            {
                "setting": setting,
                "protocol": protocol,
                "epsilon": epsilon,
                "batch": batch,
                "lr": of_group[0]["lr"],
                "accuracy": f"{fmean(float(row['accuracy']) for row in of_group):.4f}",
                "lead": f"{fmean(leads):.4f}" if leads else "",
                "better": sum(lead > 0 for lead in leads),
                "seeds": len(of_group),
                "ari": f"{fmean(float(row['ari'] or 'nan') for row in of_group):.3f}",
                "processor": f"{fmean(float(row['processor']) for row in of_group):.2f}",
            }
        )
    return lines


def main(argv: Sequence[str] | None = None) -> Path:
    """Run what is missing, and write means over seeds."""
    options = read_options(parser_of(__doc__, seeds=5, minutes=60.0), argv)
    sheet = Sheet("batches_runs", RESULTS)
    end = time.monotonic() + 60 * options.minutes
    with cpu_threads(1):
        tuned = sheet.fill(tuning_cells(), measure, options.minutes)
        minutes = max(0.0, (end - time.monotonic()) / 60)
        rows = sheet.fill(cells(tuned, options.seeds), measure, minutes)
    return write("batches", compared(rows))


if __name__ == "__main__":
    print(main())

"""Hold the plans of private runs (`securecluster plan`) to what happened.

python -m benchmarks.plan [--minutes 20]

A setting is a protocol with its options, a data set, a scenario, numbers of clients and samples,
and an ε, all of them drawn at random (`drawn`). Its plan is made from the bundled digits in the
size of the data set's images, or from 1,000 images of the set itself that no client has. Then the
run happens once, on clients that no plan saw.

The settings of `calibration` chose the margins of `securecluster.app.plan`: a little more than what
would have covered nine of ten. Those of `held-out` were drawn with another seed and run once, when
the margins no longer changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.grid import parser_of, read_options
from benchmarks.sheet import Cell, Row, Sheet
from benchmarks.table import RESULTS, SEEDED, write
from securecluster import Federation
from securecluster.app import plan as plans
from securecluster.app.registry import protocol_class
from securecluster.data import SOURCES, Source
from securecluster.data.pools import ArrayPool
from securecluster.data.scenarios import scenario

CALIBRATION, HELD_OUT = "calibration", "held-out"
DRAWS = {CALIBRATION: (41, 20), HELD_OUT: (42, 30)}  # seed and number of settings
DATA = ("mnist", "fashion_mnist")
PUBLIC = ("digits", "own")
CLIENTS = (8, 12, 16)
SAMPLES = (40, 80)
ROUNDS = (4,)
EXAMPLE = {"dp_unit": "example"}
# options of each protocol, and the ends of the range of ε, in which its clusters are lost
PROTOCOLS: Mapping[str, tuple[dict[str, Any], float, float]] = {
    "cfl": ({**EXAMPLE}, 4.0, 256.0),
    "flhc": ({**EXAMPLE, "pre_rounds": 2}, 4.0, 256.0),
    "ifca": ({**EXAMPLE, "k": 4}, 2.0, 128.0),
    "clove": ({**EXAMPLE, "k": 4}, 2.0, 64.0),
    "srfca": ({**EXAMPLE}, 4.0, 256.0),
    "signature": ({**EXAMPLE, "k": 4}, 1.0, 64.0),
    "hidden": ({"k": 4}, 32.0, 4096.0),
    "fedavg": ({"aggregation": "secagg"}, 1.0, 64.0),
    "finetune": ({**EXAMPLE}, 0.5, 16.0),
    "local": ({**EXAMPLE}, 0.5, 16.0),
}
SIZE = 28
PUBLIC_ROWS = 1000
PRIVATE_ROWS = 4000
SIMULATIONS = 1
PLAN_SEED = 7000
QUANTILE = 0.9


def drawn(part: str) -> list[Cell]:
    """Return the settings of a part, each protocol about equally often.

    Args:
        part: "calibration" or "held-out".
    """
    seed, count = DRAWS[part]
    draw = np.random.default_rng(seed)
    names = list(PROTOCOLS)
    cells: list[Cell] = []
    for number in range(count):
        name = names[number % len(names)]
        _, low, high = PROTOCOLS[name]
        # powers of two, so that settings share searches for their noise
        power = draw.integers(int(math.log2(low)), int(math.log2(high)), endpoint=True)
        cell = {
            "part": part,
            "number": number,
            "protocol": name,
            "data": str(draw.choice(DATA)),
            "public": str(draw.choice(PUBLIC)),
            "scenario": str(draw.choice(["label-swap", "rotation"])),
            "clients": int(draw.choice(CLIENTS)),
            "samples": int(draw.choice(SAMPLES)),
            "rounds": int(draw.choice(ROUNDS)),
            "epsilon": 2.0 ** int(power),
            "seed": 1000 * seed + number,
        }
        cells.append(cell)
    return cells


@lru_cache(maxsize=2)
def parted(data: str) -> tuple[tuple[Any, Any], Source]:
    """Return public images of a data set with their labels, and the set without them.

    Args:
        data: its name.
    """
    known = SOURCES[data]()
    rows = np.random.default_rng(5).permutation(len(known.train.y))
    public = rows[:PUBLIC_ROWS]
    private = rows[PUBLIC_ROWS : PUBLIC_ROWS + PRIVATE_ROWS]
    sample = (known.train.read(public), known.train.y[public])
    pool = ArrayPool(known.train.read(private), known.train.y[private])
    return sample, Source(data, known.classes, known.shape, pool, known.test)


def measure(cell: Cell) -> dict[str, Any]:
    """Make a plan, then run.

    Args:
        cell: a setting.

    Returns:
        Ends of what the simulations did, without margins, and what happened.
    """
    options = {**PROTOCOLS[cell["protocol"]][0], "rounds": cell["rounds"], "model": "linear"}
    sample, private = parted(cell["data"])
    own = cell["public"] == "own"
    outlook = plans.plan(
        [cell["protocol"]],
        clients=cell["clients"],
        samples=cell["samples"],
        epsilon=[cell["epsilon"]],
        shape=None if own else (SIZE, SIZE),
        public=sample if own else "digits",
        scenario=cell["scenario"],
        clusters=4,
        seeds=SIMULATIONS,
        seed=PLAN_SEED,
        progress=False,
        **options,
    )
    (expected,) = outlook.forecasts
    federation = Federation.simulate(
        private,
        scenario=scenario(cell["scenario"], 4),
        clients=cell["clients"],
        samples=cell["samples"],
        seed=cell["seed"],
    )
    kind = protocol_class(cell["protocol"])
    fitted = kind(**options, clip=plans.CLIP, target_epsilon=cell["epsilon"]).fit(
        federation, SEEDED
    )
    clients = cell["clients"]
    return {
        **{name: getattr(expected, name) for name in _columns()},
        "ari_happened": fitted.agreement_["ari"],
        "accuracy_happened": float(np.nanmean(fitted.scores_)),
        "noise_planned": expected.noise,
        "noise_happened": float(fitted.kept_.learned.config["noise"]),
        "bytes_planned": expected.up + expected.down,
        "bytes_happened": round((fitted.bytes_["up"] + fitted.bytes_["down"]) / clients),
        "power": expected.power,
    }


def _columns() -> list[str]:
    """Return what a forecast says of scores, with the ends before margins."""
    names = ("ari", "accuracy")
    return [f"{name}{end}" for name in names for end in ("", "_least", "_most")]


def judged(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return whether each interval covers what happened.

    Args:
        rows: of the sheet.
    """
    found = []
    for row in rows:
        if row["status"] != "done":
            continue
        finds = row["protocol"] not in ("fedavg", "finetune", "local")
        for score in ("ari", "accuracy"):
            if score == "ari" and not finds:
                continue
            ends = [float(row[f"{score}_least"]), float(row[f"{score}_most"])]
            low, high = plans.interval(ends, score)
            assert low is not None and high is not None
            happened = float(row[f"{score}_happened"])
            line = {name: row[name] for name in ("part", "number", "protocol", "data", "public")}
            line |= {"epsilon": row["epsilon"], "score": score}
            line |= {"expected": f"{float(row[score]):.3f}", "happened": f"{happened:.3f}"}
            line |= {"low": f"{low:.3f}", "high": f"{high:.3f}", "width": f"{high - low:.3f}"}
            line |= {"short_by": f"{max(0.0, ends[0] - happened, happened - ends[1]):.3f}"}
            found.append(line | {"covered": low <= happened <= high})
    return found


def main(argv: Sequence[str] | None = None) -> Path:
    """Run what is missing, and print how often intervals cover what happened."""
    parser = parser_of(__doc__, seeds=1, minutes=20.0)
    parser.add_argument("--part", choices=[CALIBRATION, HELD_OUT, "both"], default="both")
    chosen = read_options(parser, argv)
    parts = [CALIBRATION, HELD_OUT] if chosen.part == "both" else [chosen.part]
    sheet = Sheet("plan_runs", RESULTS)
    measured = sheet.fill([cell for part in parts for cell in drawn(part)], measure, chosen.minutes)
    lines = judged(measured)
    for part in parts:
        for score in ("ari", "accuracy"):
            some = [line for line in lines if (line["part"], line["score"]) == (part, score)]
            if not some:
                continue
            short = sorted(float(line["short_by"]) for line in some)
            margin = short[min(len(short) - 1, math.ceil(QUANTILE * (len(short) + 1)) - 1)]
            covered = sum(line["covered"] for line in some)
            width = np.mean([float(line["width"]) for line in some])
            print(
                f"{part}: {covered} of {len(some)} intervals of {score} cover, of mean width "
                f"{width:.2f}; a margin of {margin:.3f} would cover {QUANTILE:.0%}"
            )
    return write("plan", lines)


if __name__ == "__main__":
    print(main())

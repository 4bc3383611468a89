"""Hold the plans of private runs (`securecluster plan`) to what happened.

python -m benchmarks.plan [--minutes 20]

A setting is a protocol with its options, a data set, a scenario, numbers of clients and samples,
and an ε, all of them drawn at random (`drawn`). Its plan is made from the bundled digits in the
size of the data set's images, or from 1,000 images of the set itself that no client has. Then the
run happens once, on clients that no plan saw.

The settings of `calibration` chose margins by split conformal prediction (`TESTED`);
`plan_runs_earlier.csv` has 34 more of them, which were drawn alike and run before `target_epsilon`
chose options. Those of `held-out` have other data sets, numbers of clients, samples and rounds, and
tested these margins, once: they were too narrow for data unlike the stand-ins. So the margins of
`securecluster.app.plan` are by all of these settings. No others test them, but `data set left out`
has margins by all data sets but that of the clients.
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
from benchmarks.table import RESULTS, SEEDED, read, write
from securecluster import Federation
from securecluster.app import plan as plans
from securecluster.app.registry import protocol_class
from securecluster.data import SOURCES, Source
from securecluster.data.pools import ArrayPool
from securecluster.data.scenarios import scenario

CALIBRATION, HELD_OUT = "calibration", "held-out"
PARTS = (CALIBRATION, HELD_OUT)
DRAWS = {CALIBRATION: (44, 40), HELD_OUT: (45, 30)}  # seed and number of settings
OWN = "own"  # a public sample of the clients' own kind
# data sets of clients, with what the stand-ins are made of
PAIRS = {
    CALIBRATION: (
        ("mnist", OWN),
        ("mnist", "digits"),
        ("mnist", "fashion_mnist"),
        ("fashion_mnist", OWN),
        ("fashion_mnist", "digits"),
        ("fashion_mnist", "mnist"),
    ),
    HELD_OUT: (
        ("femnist", OWN),
        ("femnist", "digits"),
        ("cifar10", OWN),
        ("digits", "mnist"),
        ("digits", "fashion_mnist"),
    ),
}
CLASSES = 10  # the first of femnist, which are digits
CLIENTS = {CALIBRATION: (8, 12, 16), HELD_OUT: (10, 14, 20)}
SAMPLES = {CALIBRATION: (40, 80), HELD_OUT: (50, 70)}
ROUNDS = {CALIBRATION: (4,), HELD_OUT: (3, 5)}
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
PUBLIC_ROWS = 1000
PRIVATE_ROWS = 4000
SIMULATIONS = 1
PLAN_SEED = 7000
QUANTILE = 0.9
LEFT_OUT = "data set left out"
Margins = Mapping[tuple[str, bool], float]
# by `calibration` alone; the held-out settings tested these
TESTED: Margins = {
    ("ari", False): 0.40,
    ("ari", True): 0.19,
    ("accuracy", False): 0.53,
    ("accuracy", True): 0.34,
}


def drawn(part: str) -> list[Cell]:
    """Return the settings of a part, each protocol about equally often.

    Args:
        part: one of `PARTS`.
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
        data, public = PAIRS[part][draw.integers(len(PAIRS[part]))]
        cell = {
            "part": part,
            "number": number,
            "protocol": name,
            "data": data,
            "public": public,
            "scenario": str(draw.choice(["label-swap", "rotation"])),
            "clients": int(draw.choice(CLIENTS[part])),
            "samples": int(draw.choice(SAMPLES[part])),
            "rounds": int(draw.choice(ROUNDS[part])),
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
    train = _some(known.train)
    # of digits, which have no test images of their own, a part of the rows is held out
    test = None if known.test is None else _some(known.test)
    # the bundled digits are too few, and no stand-in of their own here
    public = 0 if data == "digits" else PUBLIC_ROWS
    private = ArrayPool(train.x[public:], train.y[public:])
    return (train.x[:public], train.y[:public]), Source(data, CLASSES, known.shape, private, test)


def _some(pool: Any) -> ArrayPool:
    """Return images of the first classes in a random order, as many as are needed."""
    rows = np.flatnonzero(pool.y < CLASSES)
    rows = np.random.default_rng(5).permutation(rows)[: PUBLIC_ROWS + PRIVATE_ROWS]
    return ArrayPool(pool.read(rows), pool.y[rows])


def measure(cell: Cell) -> dict[str, Any]:
    """Make a plan, then run.

    Args:
        cell: a setting.

    Returns:
        Ends of what the simulations did, without margins, and what happened.
    """
    options = {**PROTOCOLS[cell["protocol"]][0], "rounds": cell["rounds"], "model": "linear"}
    sample, private = parted(cell["data"])
    own = cell["public"] == OWN
    outlook = plans.plan(
        [cell["protocol"]],
        clients=cell["clients"],
        samples=cell["samples"],
        epsilon=[cell["epsilon"]],
        shape=None if own else private.shape[1:],
        public=sample if own else cell["public"],
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


def judged(rows: Sequence[Row], margins: Margins = TESTED) -> list[dict[str, Any]]:
    """Return whether each interval covers what happened.

    Args:
        rows: of the sheet.
        margins: of the intervals.
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
            own = row["public"] == OWN
            low, high = plans.interval(ends, score, power=row["power"], own=own, margins=margins)
            assert low is not None and high is not None
            happened = float(row[f"{score}_happened"])
            line = {name: row[name] for name in ("part", "number", "protocol", "data", "public")}
            line |= {"epsilon": row["epsilon"], "score": score}
            line |= {"expected": f"{float(row[score]):.3f}", "happened": f"{happened:.3f}"}
            line |= {"low": f"{low:.3f}", "high": f"{high:.3f}", "width": f"{high - low:.3f}"}
            scale = _logit if score == "accuracy" else float
            short = max(0.0, scale(ends[0]) - scale(happened), scale(happened) - scale(ends[1]))
            line |= {"group": group_of(row, ends, score), "short_by": f"{short:.3f}"}
            found.append(line | {"covered": low <= happened <= high})
    return found


def group_of(row: Row, ends: Sequence[float], score: str) -> str:
    """Return in words which margin an interval has.

    Args:
        row: of the sheet.
        ends: of what the simulations did.
        score: "ari" or "accuracy".
    """
    if score == "accuracy":
        return "own sample" if row["public"] == OWN else "other data"
    return "lost" if plans.surely_lost(ends, row["power"]) else "not lost"


def _logit(accuracy: float) -> float:
    """Return the logit of an accuracy, which is kept off 0 and 1 as intervals do."""
    inside = min(max(accuracy, plans.EDGE), 1 - plans.EDGE)
    return math.log(inside / (1 - inside))


def quantile(values: Sequence[float]) -> float:
    """Return the value that covers 90 % of what comes next, by split conformal prediction.

    Args:
        values: of calibration settings.
    """
    rank = math.ceil(QUANTILE * (len(values) + 1))
    return sorted(values)[rank - 1] if rank <= len(values) else math.inf


def margins_of(rows: Sequence[Row]) -> dict[tuple[str, bool], float]:
    """Return the margins that settings choose, by split conformal prediction.

    Args:
        rows: of the sheet.
    """
    lines = judged(rows)
    groups = {
        ("ari", False): "not lost",
        ("ari", True): "lost",
        ("accuracy", False): "other data",
        ("accuracy", True): "own sample",
    }
    return {
        key: quantile([float(line["short_by"]) for line in lines if line["group"] == group])
        for key, group in groups.items()
    }


def left_out(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return verdicts on the settings of each data set, with margins by all other data sets.

    Args:
        rows: of the sheet, of all parts.
    """
    lines = []
    for data in sorted({row["data"] for row in rows}):
        margins = margins_of([row for row in rows if row["data"] != data])
        lines += judged([row for row in rows if row["data"] == data], margins)
    return [{**line, "part": LEFT_OUT} for line in lines]


def shown(part: str, lines: Sequence[Mapping[str, Any]]) -> None:
    """Print how often intervals cover, and the margins that would have covered 90 %.

    Args:
        part: of the settings.
        lines: of `judged`.
    """
    for score in ("ari", "accuracy"):
        some = [line for line in lines if (line["part"], line["score"]) == (part, score)]
        if not some:
            continue
        covered = sum(line["covered"] for line in some)
        low, high = wilson(covered, len(some))
        width = np.mean([float(line["width"]) for line in some])
        print(
            f"{part}: {covered} of {len(some)} intervals of {score} cover what happened (95 % "
            f"interval of the share: {low:.2f} to {high:.2f}), of mean width {width:.2f}"
        )
        for group in sorted({line["group"] for line in some}):
            short = [float(line["short_by"]) for line in some if line["group"] == group]
            print(
                f"  {group}: {len(short)}, a margin of {quantile(short):.3f} covers {QUANTILE:.0%}"
            )


def wilson(hits: int, of: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927).

    Args:
        hits: how often.
        of: how many times.
    """
    from scipy.stats import binomtest

    interval = binomtest(hits, of).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def main(argv: Sequence[str] | None = None) -> Path:
    """Run what is missing, and print how often intervals cover what happened."""
    parser = parser_of(__doc__, seeds=1, minutes=20.0)
    parser.add_argument("--part", choices=PARTS)
    chosen = read_options(parser, argv)
    parts = [chosen.part] if chosen.part else PARTS
    sheet = Sheet("plan_runs", RESULTS)
    earlier = [{**row, "part": CALIBRATION} for row in read(RESULTS / "plan_runs_earlier.csv")]
    measured = sheet.fill([cell for part in parts for cell in drawn(part)], measure, chosen.minutes)
    rows = [*earlier, *measured]
    lines = judged(rows)
    if not chosen.part:
        lines += left_out(rows)
        print(f"margins by all settings: {margins_of(rows)}")
    for part in (*parts, LEFT_OUT):
        shown(part, lines)
    return write("plan", lines)


if __name__ == "__main__":
    print(main())

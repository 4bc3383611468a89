"""What malicious clients do to clusters and to honest clients' models, by protocol.

python -m benchmarks.leaks.malicious_clients [--seeds 3] [--minutes 20] [--data digits]

20 clients of digits in two true clusters, which permute the labels differently, 40 samples each,
and `mlp-32`. One-shot clustering cannot see labels, and is measured on two tasks of five labels
each. From 0 to 40 % of the clients are malicious, drawn from both true clusters;
`securecluster.attacks.malicious_clients` says what they do. Protocols that ask for the number of
clusters are told 2. SR-FCA is measured without and with its trimmed mean, β = 0.2, and with it also
without a mask: under a mask the server gets a cluster's model from one of its members. MNIST, which
is read from SECURECLUSTER_DATA or the hub, has a smaller grid and one seed.

A run that a malicious client stops has no scores, and its error stands in the column `stopped`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.grid import Grid, parser_of, product, read_options, with_seeds
from benchmarks.sheet import Cell, Row, figure, spread
from benchmarks.table import RESULTS
from securecluster import Federation
from securecluster.attacks.malicious_clients import BEHAVIOURS, choose_clients, impact, run_with
from securecluster.core.client_names import at
from securecluster.data.scenarios import LabelPermutation, Tasks
from securecluster.errors import SecureClusterWarning, UpdateError
from securecluster.figures.looks import looks, name_of
from securecluster.protocols import (
    CFL,
    FLHC,
    IFCA,
    SRFCA,
    ClusteringProtocol,
    FedAvg,
    OneShot,
    Settings,
)

CLIENTS = 20
SAMPLES = 40
CLUSTERS = 2
MODEL = "mlp-32"
NONE = "none"  # behaviour of the control, in which all clients are honest
PERMUTATION = "label-permutation"
SCENARIOS: dict[str, Any] = {"tasks": Tasks(), PERMUTATION: LabelPermutation(CLUSTERS)}
SCENARIO_OF = {"oneshot": "tasks"}  # the other protocols' is `PERMUTATION`
SRFCA_OF_FEW_ROUNDS = partial(SRFCA, local_rounds=6, rounds=8, model=MODEL)
PROTOCOLS: dict[str, Callable[[], ClusteringProtocol]] = {
    "fedavg": partial(FedAvg, rounds=12, model=MODEL),
    "cfl": partial(CFL, rounds=20, model=MODEL),
    "flhc": partial(FLHC, rounds=12, pre_rounds=5, model=MODEL),
    "srfca": SRFCA_OF_FEW_ROUNDS,
    "srfca trimmed": partial(SRFCA_OF_FEW_ROUNDS, trim=0.2),
    "srfca trimmed, no mask": partial(SRFCA_OF_FEW_ROUNDS, trim=0.2, mask="none"),
    "ifca": partial(IFCA, k=CLUSTERS, rounds=18, starts=3, start_rounds=3, model=MODEL),
    "oneshot": partial(OneShot, rounds=12, tasks=CLUSTERS, model=MODEL),
}
SHARES = {"digits": (0.05, 0.1, 0.2, 0.3, 0.4), "mnist": (0.1, 0.3)}
MOST_SEEDS = {"digits": 100, "mnist": 1}
VALUES = ("ari", "accuracy", "isolated", "precision", "cast_out")
# panels of the figure: the column, its text
PANELS = {
    "ari": "ARI of honest clients",
    "accuracy": "accuracy of honest clients",
    "isolated": "malicious clients isolated",
}


def cells(data: str, seeds: int) -> list[Cell]:
    """Return protocols by behaviours by shares by seeds, and each protocol without attack.

    Args:
        data: "digits" or "mnist".
        seeds: how many, from 0 on.
    """
    attacked = [*product(behaviour=BEHAVIOURS, share=SHARES[data])]
    settings = []
    for protocol in PROTOCOLS:
        scenario = SCENARIO_OF.get(protocol, PERMUTATION)
        case = {"data": data, "scenario": scenario, "protocol": protocol}
        settings.append({**case, "behaviour": NONE, "share": 0.0})
        settings += [{**case, **attack} for attack in attacked]
    return with_seeds(settings, range(min(seeds, MOST_SEEDS[data])))


def all_cells(scale: str, seeds: int) -> list[Cell]:
    """Return the cells of both data sets, of which there is one scale."""
    requested: list[Cell] = []
    for data in SHARES:
        requested += cells(data, seeds)
    # a run that is cut off has whole seeds of all data
    requested.sort(key=itemgetter("seed"))
    return requested


# one entry is enough: the cells of one scenario and seed are measured in succession
@lru_cache(maxsize=1)
def federation(data: str, scenario: str, seed: int) -> Federation:
    """Return the clients, all of them honest.

    Args:
        data: name of the data set.
        scenario: a name of `SCENARIOS`.
        seed: of every draw.
    """
    return Federation.simulate(
        data, scenario=SCENARIOS[scenario], clients=CLIENTS, samples=SAMPLES, seed=seed
    )


def measure(cell: Cell) -> dict[str, Any]:
    """Run one protocol with malicious clients.

    Args:
        cell: one of `cells`.

    Returns:
        The fields of `securecluster.attacks.malicious_clients.Impact`, and `stopped`: the error
        that ended the run, or "".
    """
    seed = cell["seed"]
    clients = federation(cell["data"], cell["scenario"], seed)
    protocol = PROTOCOLS[cell["protocol"]]()
    malicious: tuple[int, ...] = ()
    behaviour = cell["behaviour"]
    if behaviour == NONE:
        # nobody behaves in any way
        behaviour = next(iter(BEHAVIOURS))
    else:
        malicious = choose_clients(CLIENTS, cell["share"], seed)
    settings = Settings(threads=1, keys_from_seed=True)
    with warnings.catch_warnings():
        # models at chance are what this measures
        warnings.simplefilter("ignore", SecureClusterWarning)
        try:
            attackers = [at(position) for position in malicious]
            fitted = run_with(protocol, clients, behaviour, attackers, seed, settings)
        except UpdateError as error:
            return {"stopped": str(error)}
    assert clients.truth is not None
    damage = impact(fitted.labels_, clients.truth, fitted.scores_, malicious)
    return {**asdict(damage), "stopped": ""}


def draw(rows: Sequence[Row]) -> Any:
    """Draw means on digits over the share of malicious clients, a row of panels for each behaviour.

    Args:
        rows: of the sheet.
    """
    digits = [row for row in rows if row["data"] == "digits"]
    lines = len(BEHAVIOURS)
    canvas, axes = figure(11, 2.2 * lines, lines, len(PANELS))
    for line, behaviour in enumerate(BEHAVIOURS):
        for column, (value, text) in enumerate(PANELS.items()):
            ax = axes[line, column]
            _draw_panel(ax, digits, behaviour, value)
            if line == 0:
                ax.set_title(text)
        axes[line, 0].set_ylabel(behaviour)
        axes[-1, 1].set_xlabel("share of malicious clients")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    return canvas


def _draw_panel(ax: Any, rows: Sequence[Row], behaviour: str, value: str) -> None:
    """Draw a line of means over the share for each protocol.

    Args:
        ax: the panel's axes.
        rows: of digits.
        behaviour: of the malicious clients.
        value: the rows' column.
    """
    shown = [row for row in rows if row["behaviour"] in (behaviour, NONE)]
    labels = {name: name.replace(" ", ":", 1) for name in PROTOCOLS}
    styles = looks(list(labels.values()))
    for k, (name, label) in enumerate(labels.items()):
        protocol_rows = [row for row in shown if row["protocol"] == name]
        means = spread(protocol_rows, ["share"], value)
        shares = sorted(means, key=lambda key: float(key[0]))
        # shifted a little, since several lines coincide
        offset = (k - 3.5) * 0.003
        ax.plot(
            [float(share[0]) + offset for share in shares],
            [means[share][0] for share in shares],
            linestyle=styles[label].line,
            color=styles[label].color,
            marker=styles[label].marker,
            markersize=4,
            label=name_of(label),
            alpha=0.8,
        )
    ax.set_xlim(-0.02, 0.42)
    ax.set_ylim(-0.08, 1.08)
    ax.grid(alpha=0.3)


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print and draw.

    Args:
        argv: the arguments; those of the command line by default.
    """
    parser = parser_of(__doc__, seeds=3, minutes=20)
    parser.add_argument("--data", choices=list(SHARES), help="both by default")
    chosen = read_options(parser, argv)

    def measurable(requested: Sequence[Cell]) -> Sequence[Cell]:
        return [cell for cell in requested if chosen.data in (None, cell["data"])]

    # the picture shows all rows, also those that are not measured now
    grid = Grid(
        __doc__,
        "malicious_clients",
        all_cells,
        measure,
        by=["data", "protocol", "behaviour", "share"],
        values=VALUES,
        folder=RESULTS,
        measurable=measurable,
        draw=draw,
    )
    return grid.run(chosen)


if __name__ == "__main__":
    print(main())

"""Measure the tables of Briggs et al. 2020.

python -m benchmarks.papers.flhc_tables --table 2 [--seeds 3] [--full] [--minutes 10]

They have FL+HC over client fraction and rounds before the clustering (Tables I to III), and over
metric and linkage (Tables IV to VI). Tables I and IV are of pathological MNIST (each client holds
two labels), II and V of MNIST with swapped labels (four groups of 25 clients), III and VI of
FEMNIST by writers.

Tables I to III have ward linkage, l2 and the paper's threshold: 3.0, and for FEMNIST 10.0. The
latter belongs to the paper's network; at the scale for a CPU, whose updates are shorter, it is 0.75
here.

Tables IV to VI are at n = 10 and cf = 0.2. The paper reports the best of thresholds it does not
print. Here the best is by test accuracy in the last round, so test samples choose it, among the
default rule's cut and those into 21 and into 4 clusters (4 is the true number in Table V). The
default rule's own figures, which nothing was chosen for, stand beside (`rule_…`).

Scales and columns are `flhc_runs`'s. Images are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.papers.flhc_runs import grid, pairs, table
from benchmarks.papers.sheet import Cell, Sheet, parser_of, read_options


@dataclass(frozen=True)
class Table:
    """A table of the paper.

    Args:
        data: the data set.
        scenario: how samples are dealt to clients.
        over: the two settings that its rows differ in.
        paper: by these two, what the paper prints: accuracy after the clustering and at round 50,
            and the shares of clients at the target then, each with its ratio to FL.
        thresholds: the threshold of a table over cf and n, by scale.
    """

    data: str
    scenario: str
    over: tuple[str, str]
    paper: Mapping[Any, str]
    thresholds: Mapping[str, float] | None = None

    def cells(self, scale: str, seeds: int) -> list[Cell]:
        """Return the cells of FL, and of FL+HC on the same clients.

        Args:
            scale: "cpu" or "full".
            seeds: the number of seeds.
        """
        if self.thresholds is None:
            return pairs(self.data, self.scenario, scale, seeds, "best", self.paper)
        threshold = self.thresholds[scale]
        return grid(self.data, self.scenario, scale, seeds, threshold, self.paper)


FRACTION_AND_ROUNDS = ("cf", "n")
METRIC_AND_LINKAGE = ("metric", "linkage")
# III-A prints 3.0 for MNIST and 10.0 for FEMNIST
MNIST_THRESHOLDS = {"cpu": 3.0, "full": 3.0}
# the network for a CPU has shorter updates than the paper's
FEMNIST_THRESHOLDS = {"cpu": 0.75, "full": 10.0}
# “–”: no client reaches the target with FL, so there is no ratio
TABLE_1 = {
    (0.1, 1): "91.1 (1.9x) 98.5 (1.0x) 62.0 (20.7x) 83.0 (1.8x)",
    (0.1, 3): "80.4 (1.7x) 97.1 (1.0x) 46.0 (46.0x) 67.0 (1.5x)",
    (0.1, 5): "89.3 (1.1x) 97.9 (1.0x) 45.0 (7.5x) 74.0 (1.6x)",
    (0.1, 10): "92.0 (1.1x) 98.2 (1.0x) 40.0 (2.9x) 77.0 (1.7x)",
    (0.2, 1): "91.4 (1.6x) 98.7 (1.0x) 63.0 (31.5x) 87.0 (2.0x)",
    (0.2, 3): "92.5 (1.6x) 98.3 (1.0x) 58.0 (14.5x) 73.0 (1.7x)",
    (0.2, 5): "90.2 (1.0x) 98.4 (1.0x) 49.0 (5.4x) 74.0 (1.7x)",
    (0.2, 10): "93.6 (1.0x) 98.3 (1.0x) 55.0 (3.9x) 71.0 (1.6x)",
    (0.5, 1): "91.9 (1.5x) 98.7 (1.0x) 68.0 (68.0x) 89.0 (1.7x)",
    (0.5, 3): "94.6 (1.1x) 98.8 (1.0x) 67.0 (16.8x) 83.0 (1.6x)",
    (0.5, 5): "93.6 (1.0x) 98.3 (1.0x) 61.0 (7.6x) 78.0 (1.5x)",
    (0.5, 10): "93.8 (1.0x) 98.0 (1.0x) 39.0 (2.0x) 63.0 (1.2x)",
    (1.0, 1): "94.1 (1.3x) 98.6 (1.0x) 64.0 (32.0x) 77.0 (1.6x)",
    (1.0, 3): "94.3 (1.1x) 98.5 (1.0x) 64.0 (8.0x) 81.0 (1.7x)",
    (1.0, 5): "93.6 (1.0x) 99.1 (1.0x) 61.0 (5.1x) 82.0 (1.7x)",
    (1.0, 10): "95.6 (1.0x) 98.8 (1.0x) 48.0 (2.8x) 70.0 (1.4x)",
}
# the caption says a target of 80 %, Section III one of 99 %; FL has 80 % accuracy at most here
TABLE_2 = {
    (0.1, 1): "98.2 (1.3x) 98.7 (1.3x) 49.0 (–) 61.0 (–)",
    (0.1, 3): "98.1 (1.3x) 99.0 (1.3x) 46.0 (–) 74.0 (–)",
    (0.1, 5): "98.4 (1.3x) 99.0 (1.3x) 48.0 (–) 73.0 (–)",
    (0.1, 10): "98.6 (1.4x) 99.0 (1.3x) 63.0 (5.3x) 75.0 (–)",
    (0.2, 1): "98.2 (1.3x) 98.6 (1.2x) 48.0 (–) 64.0 (–)",
    (0.2, 3): "98.2 (1.3x) 99.1 (1.3x) 43.0 (–) 77.0 (–)",
    (0.2, 5): "98.4 (1.3x) 99.1 (1.3x) 52.0 (–) 80.0 (–)",
    (0.2, 10): "98.6 (1.2x) 99.0 (1.3x) 57.0 (–) 77.0 (–)",
    (0.5, 1): "98.1 (1.3x) 98.5 (1.2x) 49.0 (–) 54.0 (–)",
    (0.5, 3): "98.3 (1.3x) 99.0 (1.2x) 51.0 (–) 73.0 (–)",
    (0.5, 5): "98.5 (1.3x) 99.1 (1.2x) 54.0 (–) 76.0 (–)",
    (0.5, 10): "98.6 (1.2x) 99.2 (1.2x) 61.0 (–) 79.0 (–)",
    (1.0, 1): "98.3 (1.3x) 98.4 (1.2x) 53.0 (–) 56.0 (–)",
    (1.0, 3): "98.3 (1.3x) 99.0 (1.2x) 54.0 (–) 74.0 (–)",
    (1.0, 5): "98.5 (1.3x) 99.0 (1.2x) 59.0 (–) 76.0 (–)",
    (1.0, 10): "98.6 (1.2x) 99.0 (1.2x) 59.0 (–) 74.0 (–)",
}
TABLE_3 = {
    (0.1, 1): "30.7 (2.8x) 74.3 (1.0x) 14.2 (–) 44.4 (0.9x)",
    (0.1, 3): "51.4 (1.4x) 73.6 (0.9x) 15.0 (27.5x) 42.2 (0.9x)",
    (0.1, 5): "69.6 (1.4x) 77.6 (1.0x) 29.7 (6.4x) 51.2 (1.1x)",
    (0.1, 10): "71.0 (1.1x) 76.3 (1.0x) 32.4 (2.0x) 47.1 (1.0x)",
    (0.2, 1): "12.7 (0.6x) 32.3 (0.4x) 0.5 (–) 19.6 (0.4x)",
    (0.2, 3): "71.2 (1.9x) 77.1 (1.0x) 38.7 (28.4x) 48.8 (1.0x)",
    (0.2, 5): "69.4 (1.3x) 77.4 (1.0x) 31.3 (4.8x) 49.3 (1.0x)",
    (0.2, 10): "6.3 (0.1x) 5.1 (0.1x) 0.0 (–) 0.0 (–)",  # the collapse is the paper's own
    (0.5, 1): "43.5 (2.2x) 75.2 (1.0x) 15.0 (–) 46.0 (0.9x)",
    (0.5, 3): "57.6 (1.5x) 17.2 (0.2x) 28.9 (15.1x) 8.2 (0.2x)",
    (0.5, 5): "69.3 (1.3x) 77.7 (1.0x) 28.1 (4.7x) 51.5 (1.0x)",
    (0.5, 10): "69.3 (1.0x) 75.5 (1.0x) 29.7 (1.4x) 45.5 (0.9x)",
    (1.0, 1): "72.3 (2.9x) 77.7 (1.0x) 39.2 (0.0x) 52.0 (1.0x)",  # 0.0x as printed
    (1.0, 3): "not completed",  # in the time that the authors allowed
    (1.0, 5): "70.7 (1.3x) 77.9 (1.0x) 31.1 (4.8x) 51.2 (1.0x)",
    (1.0, 10): "69.6 (1.0x) 75.4 (1.0x) 33.5 (1.4x) 45.0 (0.9x)",
}
# III-B: n = 10, cf = 0.2, and for each row the best of thresholds that are not printed
TABLE_4 = {
    ("cosine", "average"): "89.3 (1.0x) 97.8 (1.0x) 12.0 (0.9x) 55.0 (1.3x)",
    ("cosine", "complete"): "91.3 (1.0x) 97.8 (1.0x) 23.0 (1.6x) 56.0 (1.3x)",
    ("cosine", "single"): "92.0 (1.0x) 97.7 (1.0x) 19.0 (1.4x) 51.0 (1.2x)",
    ("l2", "average"): "95.5 (1.0x) 98.9 (1.0x) 69.0 (4.9x) 86.0 (2.0x)",
    ("l2", "complete"): "96.6 (1.0x) 98.8 (1.0x) 72.0 (5.1x) 84.0 (1.9x)",
    ("l2", "single"): "93.6 (1.0x) 98.1 (1.0x) 44.0 (3.1x) 67.0 (1.5x)",
    ("l2", "ward"): "97.3 (1.1x) 99.5 (1.0x) 79.0 (5.6x) 89.0 (2.0x)",
    ("l1", "average"): "99.4 (1.1x) 99.4 (1.0x) 89.0 (6.4x) 91.0 (2.1x)",
    ("l1", "complete"): "99.2 (1.1x) 99.3 (1.0x) 91.0 (6.5x) 92.0 (2.1x)",
    ("l1", "single"): "99.4 (1.1x) 99.4 (1.0x) 87.0 (6.2x) 91.0 (2.1x)",
}
TABLE_5 = {
    ("cosine", "average"): "98.7 (1.3x) 99.1 (1.3x) 62.0 (–) 79.0 (–)",
    ("cosine", "complete"): "98.5 (1.2x) 99.1 (1.3x) 56.0 (–) 78.0 (–)",
    ("cosine", "single"): "not completed",  # in the time that the authors allowed
    ("l2", "average"): "98.2 (1.2x) 98.3 (1.2x) 50.0 (–) 53.0 (–)",
    ("l2", "complete"): "98.4 (1.2x) 99.1 (1.3x) 53.0 (–) 76.0 (–)",
    ("l2", "single"): "98.2 (1.2x) 98.3 (1.2x) 47.0 (–) 51.0 (–)",
    ("l2", "ward"): "98.5 (1.2x) 99.1 (1.3x) 57.0 (–) 77.0 (–)",
    ("l1", "average"): "98.3 (1.2x) 98.3 (1.2x) 51.0 (–) 50.0 (–)",
    ("l1", "complete"): "98.5 (1.2x) 98.6 (1.2x) 58.0 (–) 59.0 (–)",
    ("l1", "single"): "98.3 (1.2x) 98.4 (1.2x) 48.0 (–) 53.0 (–)",
}
TABLE_6 = {
    ("cosine", "average"): "64.2 (1.0x) 66.3 (0.8x) 19.6 (0.9x) 20.2 (0.4x)",
    ("cosine", "complete"): "62.6 (1.0x) 64.3 (0.8x) 19.3 (0.9x) 24.5 (0.5x)",
    ("cosine", "single"): "65.4 (1.0x) 74.2 (0.9x) 19.1 (0.9x) 40.1 (0.8x)",
    ("l2", "average"): "67.0 (1.0x) 78.2 (1.0x) 22.3 (1.0x) 48.2 (1.0x)",
    ("l2", "complete"): "66.8 (1.0x) 78.7 (1.0x) 23.4 (1.1x) 52.3 (1.0x)",
    ("l2", "single"): "66.4 (1.0x) 77.0 (1.0x) 22.1 (1.0x) 47.7 (1.0x)",
    ("l2", "ward"): "72.2 (1.1x) 77.4 (1.0x) 34.6 (1.6x) 48.8 (1.0x)",
    ("l1", "average"): "66.5 (1.0x) 77.4 (1.0x) 22.9 (1.1x) 48.0 (1.0x)",
    ("l1", "complete"): "69.9 (1.1x) 76.5 (1.0x) 36.0 (1.7x) 54.0 (1.1x)",
    ("l1", "single"): "66.9 (1.0x) 78.7 (1.0x) 23.4 (1.1x) 51.2 (1.0x)",
}
TABLES = {
    1: Table("mnist", "pathological", FRACTION_AND_ROUNDS, TABLE_1, MNIST_THRESHOLDS),
    2: Table("mnist", "label-swap", FRACTION_AND_ROUNDS, TABLE_2, MNIST_THRESHOLDS),
    3: Table("femnist", "natural", FRACTION_AND_ROUNDS, TABLE_3, FEMNIST_THRESHOLDS),
    4: Table("mnist", "pathological", METRIC_AND_LINKAGE, TABLE_4),
    5: Table("mnist", "label-swap", METRIC_AND_LINKAGE, TABLE_5),
    6: Table("femnist", "natural", METRIC_AND_LINKAGE, TABLE_6),
}


def main(argv: Sequence[str] | None = None) -> Sheet:
    """Measure and print one table."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--table", type=int, required=True, choices=TABLES, help="the table's number in the paper"
    )
    options = read_options(parser, argv)
    selected = TABLES[options.table]
    return table(f"flhc_table{options.table}", selected.cells, selected.over, options)


if __name__ == "__main__":
    main()

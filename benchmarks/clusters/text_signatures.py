"""Measure what signatures alone find of news as hashed words, over ε and ways to see the words.

python -m benchmarks.clusters.text_signatures

Clients are those of `benchmarks.clusters.text`, on five seeds that nothing was chosen on; ε is that
of a client's signature for an example, and the columns are those of
`benchmarks.private.signature_frontier`.
"""

from __future__ import annotations

from itertools import product

from benchmarks.clusters import text
from benchmarks.private.signature_frontier import COLUMNS, KEY, measured
from benchmarks.table import RESULTS, Journal

EPSILONS = (0.5, 1.0, 2.0, 4.0)
SEEDS = range(11, 16)


def main() -> None:
    """Measure what the file does not have yet."""
    journal = Journal(RESULTS / "text_signatures.csv", KEY, COLUMNS)
    for seed, setting, epsilon in product(SEEDS, text.SETTINGS, EPSILONS):
        if journal.lacks({"setting": setting, "kind": "auto", "epsilon": epsilon, "seed": seed}):
            clients = text.federation(setting, seed)
            journal.append([measured(setting, "auto", epsilon, seed, clients, None)])


if __name__ == "__main__":
    main()

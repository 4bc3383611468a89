"""The table of the default threshold: what it judges right, and which updates it looks at."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.clusters.gaps import PAIRS, judge, measure, updates
from securecluster import Federation
from securecluster.protocols import FLHC


def test_a_judgement_knows_what_was_possible() -> None:
    rows = torch.tensor([[0.0], [0.1], [5.0], [5.1]], dtype=torch.float64)
    right = judge(rows, (0, 0, 1, 1), "l2", "average")
    assert (right["exact"], right["possible"], right["clusters"]) == (True, True, 2)
    assert right["gap_at_truth"] == 50.0
    hopeless = judge(rows, (0, 1, 0, 1), "l2", "average")
    assert (hopeless["exact"], hopeless["possible"]) == (False, False)
    missed = judge(rows, (0, 1, 2, 3), "l2", "average")
    assert (missed["exact"], missed["possible"], missed["gap_at_truth"]) == (False, True, None)


def test_every_pair_is_judged_on_the_clustering_rounds_updates(small: Federation) -> None:
    found = measure(
        {"data": "digits", "scenario": "label-swap", "clusters": 2, "clients": 6, "samples": 40},
        0,
        2,
    )
    assert [(row["metric"], row["linkage"]) for row in found] == PAIRS
    rows = updates(small, 2)
    merges = np.array(FLHC(rounds=3, pre_rounds=2).fit(small).history_[2]["merges"])
    units = torch.nn.functional.normalize(rows.double(), dim=1)
    # ward merges the closest two first
    assert np.isclose(merges[0, 2], float(torch.pdist(units).min()), rtol=1e-5)

"""Clients that change their cluster between two federations, and what a run that goes on makes of
them.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.clusters import drift
from securecluster import CFL, Federation, LabelSwap
from securecluster.protocols import Settings, Signature

SOURCE = drift.balanced(
    Federation.simulate("digits", scenario=LabelSwap(clusters=2), clients=40, samples=20, seed=3),
    12,
)


def test_a_third_of_each_cluster_moves_and_no_sample_is_in_both_halves() -> None:
    before, after, moved = drift.drifting(SOURCE, 1 / 3, seed=1)
    assert before.names == after.names and len(before) == 12
    truth, later = np.array(before.truth), np.array(after.truth)
    assert np.array_equal(truth != later, moved)
    assert [int(moved[truth == cluster].sum()) for cluster in (0, 1)] == [2, 2]
    kept = [{x.tobytes() for s in fed.shards for x in np.asarray(s.x)} for fed in (before, after)]
    assert len(kept[0]) > 200 and not kept[0] & kept[1]
    # the samples of the time after are of clients of that cluster
    owner = {np.asarray(s.x).tobytes(): t for s, t in zip(SOURCE.shards, SOURCE.truth, strict=True)}
    assert [owner[np.asarray(shard.x).tobytes()] for shard in after.shards] == later.tolist()
    assert not drift.drifting(SOURCE, 0.0, seed=1)[2].any()
    with pytest.raises(ValueError, match="too few clients"):
        drift.drifting(SOURCE.select(range(13)), 1.0, seed=1)


def test_a_run_goes_on_within_its_clusters_and_those_of_cfl_may_split() -> None:
    before, after, _ = drift.drifting(SOURCE, 1 / 3, seed=1)
    options = {**drift.TRAINING, "epochs": 1, "rounds": 2, "k": 2}
    first = Signature(**options).fit(before, Settings(keys_from_seed=True))
    labels, rounds, last = drift.go_on(Signature, options, first, after)
    assert labels == first.labels_.tolist() and len(rounds) == drift.ROUNDS
    # sums over clusters are those over all clients
    assert rounds[-1] == pytest.approx(float(np.mean(last)), abs=1e-9)
    del options["k"]
    labels, *_ = drift.go_on(CFL, {**options, "eps1": 1e9, "eps2": 0.0}, first, after)
    assert len({*zip(labels, first.labels_.tolist(), strict=True)}) == len(set(labels))

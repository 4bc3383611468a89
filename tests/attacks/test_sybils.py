"""Sybils that are split off with their victim read its update, until sums have more members."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import pytest
import torch

from securecluster import Federation, LabelSwap
from securecluster.attacks.sybils import (
    BEHAVIOURS,
    beyond,
    copied,
    crowds,
    isolation,
    kept,
    run_with_sybils,
)
from securecluster.errors import UsageError
from securecluster.protections.registry import survivors_of
from securecluster.protocols import CFL, FLHC, IFCA, SRFCA, Settings, Signature

CLIENTS = 16
SHARED: dict[str, Any] = {"model": "linear", "mask": "none", "aggregation": "secagg"}
PROTOCOLS: dict[str, Any] = {
    "cfl": partial(CFL, **SHARED, rounds=8, sketch=64),
    "flhc": partial(FLHC, **SHARED, rounds=4, sketch=64, pre_rounds=2),
    "srfca": partial(SRFCA, **SHARED, rounds=2, local_rounds=12, relevance="pads", sealed=True),
    "signature": partial(Signature, **SHARED, rounds=2),
    "ifca": partial(IFCA, **SHARED, rounds=3, k=5, starts=1),
}
VICTIM = 13
SETTINGS = Settings(threads=1, keys_from_seed=True)


@lru_cache
def federation() -> Federation:
    """Four true clusters of four that swap labels."""
    return Federation.simulate(
        "digits", scenario=LabelSwap(clusters=4), clients=CLIENTS, samples=40, seed=0
    )


def attacked(name: str, behaviour: str, sybils: tuple[int, ...], **options: Any) -> Any:
    run = run_with_sybils(
        PROTOCOLS[name](**options), federation(), behaviour, VICTIM, sybils, SETTINGS
    )
    return run, isolation(run, survivors_of(run.fitted.kept_.learned.config))


def kin(count: int, companions: bool) -> tuple[int, ...]:
    """Return clients of the victim's true cluster, or of others."""
    truth = federation().truth
    assert truth is not None
    same = [i for i in range(CLIENTS) if i != VICTIM and (truth[i] == truth[VICTIM]) is companions]
    return tuple(same[:count])


@pytest.mark.parametrize(
    ("name", "behaviour", "count"),
    [("cfl", "copy", 3), ("flhc", "copy", 3), ("srfca", "copy", 1), ("signature", "honest", 3)],
)
def test_sybils_read_their_victim_and_two_members_more_than_they_are_end_it(
    name: str, behaviour: str, count: int
) -> None:
    """A rule of as many members as Sybils and one more is one that they fill by themselves."""
    sybils = kin(count, companions=behaviour == "honest")
    run, filled = attacked(name, behaviour, sybils, least_members=count + 1)
    assert filled.isolated and filled.smallest == count + 1
    assert filled.error is not None and filled.error < 1e-5
    # the row that was read, against what the victim trained
    alone = [crowd for crowd in crowds(run) if crowd.contributors == {VICTIM}]
    assert all(crowd.members == {VICTIM, *sybils} for crowd in alone)
    _, ended = attacked(name, behaviour, sybils, least_members=count + 2)
    assert not ended.isolated and ended.error is None and not ended.droppable
    assert ended.smallest is None or ended.smallest >= count + 2


@pytest.mark.always
def test_sybils_of_ifca_claim_the_model_that_their_victim_chose_alone() -> None:
    """Its sums are over all clients: the block of a model is what they are alone in."""
    _, found = attacked("ifca", "copy", kin(3, companions=False))
    assert found.isolated and found.error is not None and found.error < 1e-5
    assert found.smallest == CLIENTS and not found.droppable


def test_honest_clients_isolate_nobody_that_true_clusters_do_not() -> None:
    _, found = attacked("flhc", "honest", ())
    assert not found.isolated and found.smallest == 4


def test_what_sybils_send_follows_from_the_rows_of_a_call() -> None:
    rows = torch.tensor([[1.0, 0.0], [5.0, 5.0], [0.0, 1.0], [0.0, 3.0]])
    assert kept(rows, 0, [1, 3]).tolist() == [[5.0, 5.0], [0.0, 3.0]]
    assert copied(rows, 0, [1, 3]).tolist() == [[1.0, 0.0]] * 2
    # the only other one is client 2
    assert beyond(rows, 0, [1, 3]).tolist() == [[2.0, -1.0]] * 2


def test_an_unknown_behaviour_is_refused() -> None:
    with pytest.raises(UsageError, match=f"behaviour.*{next(iter(BEHAVIOURS))}"):
        attacked("flhc", "modest", (1,))

"""Cohorts of clients, and which clients sums can be solved for."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from securecluster.privacy.cohorts import Cohorts, RowSpace, whole_cohorts


def solvable_by_fractions(clients: int, lists: list[list[int]]) -> set[int]:
    """The clients whose unit vector is in the row space, by elimination over the rationals."""

    def rank(rows: list[list[int]]) -> int:
        matrix = [[Fraction(int(client in row)) for client in range(clients)] for row in rows]
        found = 0
        for column in range(clients):
            pivot = next((r for r in range(found, len(matrix)) if matrix[r][column]), None)
            if pivot is None:
                continue
            matrix[found], matrix[pivot] = matrix[pivot], matrix[found]
            for r in range(found + 1, len(matrix)):
                factor = matrix[r][column] / matrix[found][column]
                matrix[r] = [a - factor * b for a, b in zip(matrix[r], matrix[found], strict=True)]
            found += 1
        return found

    before = rank(lists)
    return {client for client in range(clients) if rank([*lists, [client]]) == before}


@pytest.mark.parametrize("seed", range(12))
def test_clients_that_can_be_solved_for_are_those_of_rational_arithmetic(seed: int) -> None:
    draw = np.random.default_rng(seed)
    clients = int(draw.integers(3, 9))
    lists = []
    for _ in range(int(draw.integers(1, clients + 2))):
        size = int(draw.integers(1, clients + 1))
        lists.append(sorted(draw.choice(clients, size, replace=False).tolist()))
    space = RowSpace(clients, lists)
    assert set(space.solvable) == solvable_by_fractions(clients, lists)
    matrix = np.zeros((len(lists), clients))
    for row, members in enumerate(lists):
        matrix[row, members] = 1
    assert space.rank == np.linalg.matrix_rank(matrix)


def test_no_two_lists_differ_in_one_client_and_all_are_solved_for() -> None:
    lists = [[0, 1], [1, 2], [0, 2]]
    assert RowSpace(3, lists[:2]).solvable == []
    assert RowSpace(3, lists).solvable == [0, 1, 2]


def test_a_list_that_follows_from_others_enlarges_nothing() -> None:
    space = RowSpace(6)
    assert space.add([0, 1, 2, 3])
    assert space.add([0, 1])
    assert not space.add([2, 3])
    assert not space.add([0, 1, 2, 3])
    assert space.rank == 2


@pytest.mark.parametrize("clients", [2, 3, 7, 20, 53])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("size", [None, 2, 5, 100])
def test_sums_over_whole_cohorts_can_be_solved_for_nobody(
    clients: int, share: float, size: int | None
) -> None:
    rule = Cohorts.drawn(clients, 0, minimum=2, share=share, size=size)
    cohorts = rule.of(range(clients))
    assert sorted(client for cohort in cohorts for client in cohort) == list(range(clients))
    sizes = {len(cohort) for cohort in cohorts}
    assert min(sizes) >= min(clients, size or 2)
    assert max(sizes) - min(sizes) <= 1
    space = RowSpace(clients, cohorts)
    assert (space.rank, space.solvable) == (len(cohorts), [])
    pairs = [[*first, *second] for first, second in combinations(cohorts, 2)]
    assert not any(space.add(pair) for pair in pairs)


def test_by_default_a_cohort_is_what_a_round_asks_and_a_sum_outlives_the_loss_of_one() -> None:
    def sizes(clients: int, share: float) -> list[int]:
        rule = Cohorts.drawn(clients, 0, minimum=2, share=share, size=None)
        return [len(cohort) for cohort in rule.of(range(clients))]

    assert sizes(20, 0.5) == [10, 10]
    assert sizes(100, 0.05) == [5] * 20
    assert sizes(1000, 0.1) == [10] * 100
    for clients in (6, 12, 20, 100):
        assert 2 * max(sizes(clients, 1.0)) < clients


def test_cohorts_are_public_random_and_the_same_for_every_order_of_clients() -> None:
    rule = Cohorts.drawn(20, 3, minimum=2, share=0.5, size=5)
    again = Cohorts.drawn(20, 3, minimum=2, share=0.5, size=5)
    other = Cohorts.drawn(20, 4, minimum=2, share=0.5, size=5)
    assert rule.of(range(20)) == again.of(reversed(range(20)))
    assert rule.of(range(20)) != other.of(range(20))
    # positions often follow true clusters: cohorts are not runs of neighbours
    assert rule.of(range(20))[0] != (0, 1, 2, 3, 4)


def test_a_cohort_with_a_missing_client_is_left_out_as_a_whole() -> None:
    cohorts = [(0, 1), (2, 3, 4)]
    assert whole_cohorts([0, 1, 2, 3], cohorts) == {0, 1}
    assert whole_cohorts([1, 2, 3, 4], cohorts) == {2, 3, 4}

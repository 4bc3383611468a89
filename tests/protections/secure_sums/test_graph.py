"""Graphs of secure sums, compared with exact fractions, searches and simulation."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import hypergeom

from securecluster.errors import UsageError
from securecluster.protections.secure_sums.graph import (
    FEWEST,
    SECURITY,
    Graph,
    Plan,
    _tails,
    all_pairs_threshold,
    build_graph,
    complete_graph,
    degree_and_threshold,
    failure_probability,
)

SEED = b"the hash of all signed keys"


def is_connected(graph: Graph, kept: Collection[int]) -> bool:
    """Search the graph of some members in depth."""
    left = set(kept)
    stack = [left.pop()]
    while stack:
        found = left.intersection(graph.neighbours(stack.pop()))
        left -= found
        stack.extend(found)
    return not left


def exact_tail(least: int, population: int, marked: int, draws: int) -> Fraction:
    """P[X >= least] of a hypergeometric X, in exact arithmetic."""
    ways = 0
    for count in range(max(least, 0), draws + 1):
        ways += math.comb(marked, count) * math.comb(population - marked, draws - count)
    return Fraction(ways, math.comb(population, draws))


def exact_failure(n: int, k: int, t: int, minimum: int, lost: int, colluding: int) -> Fraction:
    runs = Fraction(n * (n - k - 1), 2)
    disconnected = runs * Fraction(math.comb(lost + colluding, k), math.comb(n, k))
    leaks = n * exact_tail(2 * t - k - minimum, n - 1, colluding, k)
    too_few = n * exact_tail(k + 2 - t, n - 1, lost, k)
    return disconnected + leaks + too_few


PLAN = Plan(3)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_small_groups_share_all_pairs(count: int) -> None:
    members = random.Random(0).sample(range(10_000), count)
    graph = build_graph(members, SEED, Plan(1, colluding=0.0))
    assert graph.is_complete
    for client in members:
        assert graph.neighbours(client) == tuple(sorted(set(members) - {client}))
        assert graph.holders(client) == tuple(sorted(members))


@pytest.mark.parametrize("count", [30, 201, 500])
def test_large_groups_are_regular_and_symmetric(count: int) -> None:
    members = random.Random(0).sample(range(10_000), count)
    graph = build_graph(members, SEED, PLAN)
    degree, threshold = PLAN.degree_and_threshold(count)
    assert (graph.degree, graph.threshold) == (degree, threshold)
    assert degree % 2 == 0
    assert degree < count - 1
    edges = {(i, j) for i in members for j in graph.neighbours(i)}
    assert edges == {(j, i) for i, j in edges}
    assert all(i != j for i, j in edges)
    assert all(len(graph.neighbours(i)) == degree for i in members)
    assert all(set(graph.holders(i)) == {i, *graph.neighbours(i)} for i in members)
    assert is_connected(graph, members)


def test_a_graph_follows_from_the_seed_and_the_members_alone() -> None:
    members = list(range(300))
    shuffled = random.Random(0).sample(members, 300)
    graph = build_graph(members, SEED, PLAN)
    assert build_graph(shuffled, SEED, PLAN) == graph
    assert build_graph(members, b"another seed", PLAN).ring != graph.ring
    assert build_graph(range(1, 301), SEED, PLAN).ring != tuple(i + 1 for i in graph.ring)
    assert sorted(graph.ring) == members


def test_any_two_members_are_neighbours_equally_often() -> None:
    # 201 members, degree k: each pair in k/200 of the graphs; 400 graphs, binomial deviations
    degree, _ = degree_and_threshold(201, 3, 0.05, 0.05)
    pairs = [(0, 1), (0, 100), (57, 143)]
    counts = dict.fromkeys(pairs, 0)
    for number in range(400):
        graph = build_graph(range(201), b"%d" % number, Plan(3, 0.05, 0.05))
        for i, j in pairs:
            counts[i, j] += j in graph.neighbours(i)
    share = degree / 200
    deviation = math.sqrt(400 * share * (1 - share))
    assert all(abs(count - 400 * share) < 5 * deviation for count in counts.values())


@pytest.mark.parametrize(
    ("n", "dropouts", "colluding"),
    [(201, 0.05, 0.05), (201, 0.1, 0.1), (1000, 0.1, 0.1), (1000, 0.2, 0.0), (300, 0.0, 0.2)],
)
def test_the_degree_is_the_smallest_whose_exact_bound_is_below_the_goal(
    n: int, dropouts: float, colluding: float
) -> None:
    degree, threshold = degree_and_threshold(n, 3, dropouts, colluding)
    lost, colluders = math.floor(dropouts * n), math.floor(colluding * n)
    goal = Fraction(1, 2**SECURITY)
    assert exact_failure(n, degree, threshold, 3, lost, colluders) < goal
    below = [
        exact_failure(n, degree - 2, t, 3, lost, colluders) for t in range(degree // 2, degree)
    ]
    assert min(below) >= goal
    lower = exact_failure(n, degree, threshold - 1, 3, lost, colluders)
    assert lower >= goal


@pytest.mark.parametrize("n", [201, 1000])
@pytest.mark.parametrize("degree", [20, 60, 150])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 1.0])
def test_probabilities_agree_with_exact_fractions(n: int, degree: int, share: float) -> None:
    threshold = round(share * degree) + 1
    for minimum, dropouts, colluding in ((1, 0.1, 0.2), (4, 0.3, 0.0), (3, 0.0, 0.1)):
        lost, colluders = math.floor(dropouts * n), math.floor(colluding * n)
        ours = failure_probability(n, degree, threshold, minimum, dropouts, colluding)
        exact = exact_failure(n, degree, threshold, minimum, lost, colluders)
        assert ours == pytest.approx(float(exact), rel=1e-8, abs=1e-300)


@pytest.mark.parametrize("n", [201, 10_000])
def test_tails_are_those_of_scipy(n: int) -> None:
    for marked, draws in ((n // 10, 60), (n // 3, 100), (2, 20), (0, 6), (n - 1, 6)):
        ours = _tails(n - 1, marked, draws)
        theirs = hypergeom.sf(np.arange(-1, draws), n - 1, marked, draws)
        assert ours == pytest.approx(theirs, rel=1e-8, abs=1e-280)


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize("plan", [Plan(2), Plan(2, 0.3, 0.0), Plan(3, 0.0, 0.25)])
def test_a_client_has_no_more_neighbours_in_a_smaller_sum(plan: Plan) -> None:
    degrees = [plan.degree_and_threshold(count)[0] for count in range(3, 450)]
    most = 0
    for count, degree in enumerate(degrees, 3):
        assert degree >= most - 6
        assert degree == count - 1 or FEWEST <= degree <= count - 2
        most = max(most, degree)
    assert degrees[202 - 3] <= 1.1 * degrees[200 - 3]


@pytest.mark.parametrize("members", [13, 20, 30, 57, 120, 300])
@pytest.mark.parametrize("losses", [(0.1, 0.1), (0.2, 0.05), (0.0, 0.2)])
def test_plans_are_below_the_bound_by_exact_fractions(
    members: int, losses: tuple[float, float]
) -> None:
    plan = Plan(2, *losses)
    degree, threshold = plan.degree_and_threshold(members)
    lost = math.floor(losses[0] * members + 1e-9)
    colluders = math.floor(losses[1] * members + 1e-9)
    if degree == members - 1:
        # who sends different lists learns of 2t - n - c honest clients at least
        assert 2 * threshold - members - colluders >= 2
        assert plan.bears(members) and members - threshold >= math.floor(losses[0] * members)
    else:
        assert exact_failure(members, degree, threshold, 2, lost, colluders) < Fraction(1, 2**40)
    assert plan.least_survivors(members) == max(threshold, members // 2 + 1)


@pytest.mark.exhaustive
def test_the_bound_is_above_what_happens() -> None:
    # a graph too sparse for its dropouts, so that failures are frequent enough to be counted
    n, degree, threshold, lost, colluders = 60, 12, 9, 8, 5
    draw = random.Random(0)
    trials, failures = 2000, 0
    for _ in range(trials):
        ring = tuple(draw.sample(range(n), n))
        graph = Graph(ring, degree, threshold)
        survivors = range(lost, n)  # the first ones drop out
        honest = range(lost + colluders, n)  # the next ones collude
        few = any(len(set(graph.holders(i)) & set(survivors)) < threshold for i in survivors)
        bad = set(range(lost, lost + colluders))
        near = max(len(bad.intersection(graph.neighbours(i))) for i in honest)
        leaks = 2 * threshold - degree - 1 - near < 1
        failures += few or leaks or not is_connected(graph, honest)
    bound = failure_probability(n, degree, threshold, 1, lost / n, colluders / n)
    rate = failures / trials
    assert bound < 0.5
    assert 0.05 < rate <= bound + 3 * math.sqrt(rate / trials)


def test_members_that_stand_together_are_cut_off_only_by_two_runs_of_half_the_degree() -> None:
    graph = Graph(tuple(range(30)), 6, 4)
    first, second = {3, 4, 5}, {20, 21, 22}
    assert not is_connected(graph, set(range(30)) - first - second)
    for spared in first | second:
        assert is_connected(graph, set(range(30)) - (first | second) | {spared})


@pytest.mark.parametrize(
    ("members", "minimum", "colluding", "threshold"),
    [(3, 3, 0.0, 3), (3, 1, 0.0, 2), (4, 1, 0.0, 3), (10, 3, 0.0, 7), (100, 3, 0.1, 57)],
)
def test_the_threshold_of_all_pairs(
    members: int, minimum: int, colluding: float, threshold: int
) -> None:
    assert all_pairs_threshold(members, minimum, colluding) == threshold


def test_what_no_graph_can_bear_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot hide each among 3"):
        all_pairs_threshold(2, 3)
    with pytest.raises(UsageError, match="minimum of at least 1"):
        all_pairs_threshold(2, 0)
    with pytest.raises(UsageError, match="no graph of 201 clients bears 50% dropouts"):
        degree_and_threshold(201, 3, 0.5, 0.3)
    for fraction in (-0.1, 1.0):
        with pytest.raises(UsageError, match="fraction of dropouts"):
            degree_and_threshold(201, 3, fraction, 0.0)
        with pytest.raises(UsageError, match="fraction of colluding"):
            degree_and_threshold(201, 3, 0.0, fraction)


def test_graphs_that_are_none_are_refused() -> None:
    for ring, degree, threshold in (
        ((1, 1, 2), 2, 2),
        ((1, 2, 3, 4, 5), 3, 2),
        ((1, 2, 3), 4, 2),
        ((1, 2, 3), -2, 1),
        ((1, 2, 3), 2, 0),
        ((1, 2, 3), 2, 4),
    ):
        with pytest.raises(UsageError):
            Graph(ring, degree, threshold)
    with pytest.raises(UsageError, match="client 7 is no member"):
        complete_graph([1, 2, 3], 2).neighbours(7)

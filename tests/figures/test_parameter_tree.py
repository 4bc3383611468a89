"""The picture of a parameter tree, from one box to a chain."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from securecluster.figures.curves import draw, separation, title_of
from securecluster.figures.matrices import similarity
from securecluster.figures.parameter_tree import WIDEST, few, positions, tree


@dataclass
class Node:
    members: list[int]
    parent: int | None = None
    children: list[int] = field(default_factory=list)
    cluster: int = -1
    round: int = 0


def grown(clients: int, cuts: list[tuple[int, int]]) -> list[Node]:
    """A tree by its splits: (label of the cluster, how many members stay in its first half)."""
    nodes = [Node(list(range(clients)), cluster=0)]
    for new, (cluster, first) in enumerate(cuts, 1):
        v = next(i for i, node in enumerate(nodes) if node.cluster == cluster)
        parent = nodes[v]
        parent.children, parent.cluster, parent.round = [len(nodes), len(nodes) + 1], -1, 10 * new
        nodes += [
            Node(parent.members[:first], v, cluster=cluster),
            Node(parent.members[first:], v, cluster=new),
        ]
    return nodes


def content(clients: int, clusters: int, **more: Any) -> dict[str, Any]:
    per = [0.9 + 0.001 * c for c in range(clusters)]
    names = [str(i) for i in range(clients)]
    return {
        "protocol": "cfl",
        "data": "digits",
        "scenario": "label-swap",
        "clients": clients,
        "seed": 0,
        "truth": None,
        "names": names,
        "metric": "accuracy",
        "unit": "",
        "metrics": {"accuracy": {"after": None, "per_cluster": per}},
        **more,
    }


TREES = {
    "root": (20, []),
    "four": (20, [(0, 10), (0, 5), (1, 5)]),
    "chain": (24, [(c, 2) for c in range(11)]),
    "bushy": (
        200,
        [
            (0, 100),
            (0, 50),
            (1, 50),
            *[(c, 25) for c in range(4)],
            *[(c, 12) for c in range(8)],
            *[(c, 6) for c in range(4)],
        ],
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", TREES)
def test_boxes_do_not_overlap_and_stay_inside(kind: str) -> None:
    clients, cuts = TREES[kind]
    nodes = grown(clients, cuts)
    told = content(clients, 1 + len(cuts), fallback={"nodes": [0] * (1 + len(cuts))})
    told["truth"] = [client % 3 for client in range(clients)]
    made = tree(nodes, told | {"names": [f"hospital-number-{i}" for i in range(clients)]})
    made.draw_without_rendering()
    (axes,) = made.axes
    boxes = [text.get_bbox_patch().get_window_extent() for text in axes.texts]
    assert len(boxes) == len(nodes)
    assert not any(one.overlaps(two) for k, one in enumerate(boxes) for two in boxes[:k])
    assert all(made.bbox.contains(*box.min) and made.bbox.contains(*box.max) for box in boxes)
    assert len(axes.lines) == len(nodes) - 1
    for v, node in enumerate(nodes):
        assert all(boxes[child].y1 < boxes[v].y0 for child in node.children), "edges run down"


def test_each_box_says_what_its_node_is() -> None:
    nodes = grown(20, [(0, 10), (0, 5), (1, 5)])
    made = tree(nodes, content(20, 4, fallback={"nodes": [3, 5, 1, 6]}))
    texts = [text.get_text() for text in made.axes[0].texts]
    assert texts[0] == "node 0: 20 clients\n0 1 2 3 4 5 6 7 8 9 10 …\nsplit in round 10"
    assert texts[2] == "node 2: 10 clients\n10 11 12 13 14 15 16 …\nsplit in round 30"
    assert texts[3] == "node 3: 5 clients\n0 1 2 3 4\ncluster 0: accuracy 0.900"
    assert texts[4] == "node 4: 5 clients\n5 6 7 8 9\ncluster 2: accuracy 0.902\nhas node 1's model"
    known = content(20, 4, truth=[0] * 5 + [1] * 7 + [2] * 8)
    texts = [text.get_text() for text in tree(nodes, known).axes[0].texts]
    assert texts[3].endswith("\ntrue cluster 0") and texts[5].endswith("\n2 true clusters")
    assert "true" not in texts[0] + texts[1] + texts[2], "only of leaves"
    bare = content(1, 1)
    bare["metrics"]["accuracy"]["per_cluster"] = [None]
    assert [t.get_text() for t in tree(grown(1, []), bare).axes[0].texts] == [
        "node 0: 1 client\n0\ncluster 0"
    ]


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0.01, 0.99)), max_size=20))
def test_a_row_keeps_its_order_and_its_distance(cuts: list[tuple[int, float]]) -> None:
    nodes = [Node([], cluster=0)]
    for which, _ in cuts:
        leaves = [v for v, node in enumerate(nodes) if not node.children]
        nodes[leaves[which % len(leaves)]].children = [len(nodes), len(nodes) + 1]
        nodes += [Node([]), Node([])]
    spots = positions(nodes)
    rows: dict[int, list[float]] = {}

    def walk(v: int, depth: int) -> None:
        assert spots[v][1] == depth
        rows.setdefault(depth, []).append(spots[v][0])
        for child in nodes[v].children:
            walk(child, depth + 1)
        if nodes[v].children:
            assert spots[v][0] == pytest.approx(sum(spots[c][0] for c in nodes[v].children) / 2)

    walk(0, 0)
    assert all(right - left >= 1 - 1e-9 for row in rows.values() for left, right in pairwise(row))


def test_the_title_of_a_run_has_room_above_a_single_box() -> None:
    told = content(100, 1, labels=[0] * 100, scenario="client-dirichlet")
    picture = tree(grown(100, []), told)
    title = picture.suptitle(title_of(told), fontsize=11)
    picture.draw_without_rendering()
    box = title.get_window_extent()
    assert picture.bbox.x0 < box.x0 and box.x1 < picture.bbox.x1


def test_names_of_any_length_are_cut_to_a_box() -> None:
    assert few([]) == "" and few(["a"]) == "a" and few(["a", "b"]) == "a b"
    long = few(["the hospital by the sea and the hills", "b"])
    assert long.startswith("the hospital by") and long.endswith("… …") and len(long) <= WIDEST
    assert few(["x" * WIDEST]) == "x" * WIDEST and len(few(["x" * (WIDEST + 1)])) <= WIDEST


def test_a_state_with_a_tree_gets_its_picture_and_one_without_none(tmp_path: Path) -> None:
    told = content(20, 2, labels=[0] * 10 + [1] * 10)
    assert draw(tmp_path, told, [], SimpleNamespace(labels=[])) == []
    (path,) = draw(
        tmp_path, told, [], SimpleNamespace(tree=SimpleNamespace(nodes=grown(20, [(0, 10)])))
    )
    assert path == tmp_path / "tree.png" and path.read_bytes().startswith(b"\x89PNG")


def test_one_round_without_a_pair_of_replies_has_points_and_no_warning() -> None:
    test = {
        "cluster": 0,
        "mean_norm": 1.0,
        "max_norm": 2.0,
        "gap": None,
        "evidence": None,
        "p_value": None,
        "members": 3,
        "split": False,
    }
    made = separation([{"round": 1, "gap": None, "split_tests": [test]}])
    norms = [line for line in made.axes[1].get_lines() if len(line.get_xdata())]
    assert [line.get_marker() for line in norms] == ["o", "o"]
    made.draw_without_rendering()
    assert all(tick == round(tick) for tick in made.axes[1].get_xticks())


def test_numbers_of_many_clients_do_not_overlap() -> None:
    made = similarity(np.eye(40), [0] * 40)
    made.draw_without_rendering()
    boxes = [text.get_window_extent() for text in made.axes[0].get_xticklabels()]
    assert not any(one.overlaps(two) for one, two in pairwise(boxes))

"""The report of a finished run: result.json, the lines of its rounds, and the closing tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

import securecluster
from securecluster.app import privacy_report
from securecluster.app.number_format import METRICS, number, printable, shown
from securecluster.app.run_folder import SCHEMA, RunPlan
from securecluster.clustering.metrics import mean, share_at
from securecluster.data import Federation
from securecluster.protocols.common.base import ClusteringProtocol

MOST_CLUSTERS = 12  # rows of the closing table, and sizes or clients in a line
MOST_NAMES = 20  # clients or true clusters in a cell
MOST_RATIOS, MOST_SPLITS = 8, 4  # in the line of a round


def result(
    plan: RunPlan, federation: Federation, fitted: ClusteringProtocol, state: Any
) -> dict[str, Any]:
    """Return the content of result.json.

    Args:
        plan: what was run.
        federation: the clients and their data.
        fitted: the protocol after the run.
        state: the server's final state. From its parameter tree, where it has one, come each
            cluster's leaf (`leaves`) and the node whose model it was handed in the end, with the
            validation losses that decided (`fallback`).
    """
    labels = [int(c) for c in fitted.labels_]
    truth = None if federation.truth is None else list(federation.truth)
    dropped = {federation.names[i]: rounds for i, rounds in fitted.dropped_.items()}
    return {
        "schema": SCHEMA,
        "protocol": fitted.name,
        "data": federation.data,
        "scenario": federation.scenario,
        "model": fitted.kept_.learned.config["model"],
        "seed": federation.seed,
        "device": fitted.device_,
        "version": securecluster.__version__,
        "clients": len(federation),
        "names": list(federation.names),
        "clusters": len(set(labels)),
        "labels": labels,
        "truth": truth,
        "dropped": dropped,
        "rounds": fitted.rounds,
        "metrics": _metrics(plan, federation, fitted, labels),
        "metric": fitted.metric_,
        "unit": federation.objective.unit,
        "target": plan.settings.target,
        **_nodes(state, max(labels) + 1),
        "observer": True,
        "bytes": fitted.bytes_,
        "privacy": privacy_report.section(fitted),
        "seconds": round(fitted.seconds_, 3),
    }


def _metrics(
    plan: RunPlan, federation: Federation, fitted: ClusteringProtocol, labels: list[int]
) -> dict[str, Any]:
    """Return agreement with the true clusters, and the metric on test samples."""
    unknown = {"ari": None, "nmi": None, "purity": None, "exact": None}
    at_target = None
    if federation.objective.higher:
        at_target = share_at(fitted.scores_, plan.settings.target)
    return {
        **(fitted.agreement_ or unknown),
        fitted.metric_: _scores(fitted, labels),
        "at_target": at_target,
    }


def _nodes(state: Any, clusters: int) -> dict[str, Any]:
    """Return what result.json has of a parameter tree; nothing where there is none."""
    tree = getattr(state, "tree", None)
    handed = getattr(state, "fallback_models", None)
    entries: dict[str, Any] = {}
    if tree is not None:
        entries["leaves"] = [tree.leaf(c) for c in range(clusters)]
    if handed is not None:
        entries["fallback"] = {"nodes": handed.nodes, "losses": handed.losses}
    return entries


def _scores(fitted: ClusteringProtocol, labels: list[int]) -> dict[str, Any]:
    """Return the metric before the first clusters, at the end, and in each cluster at the end."""
    cluster_of = np.asarray(labels)
    per_cluster = [mean(fitted.scores_[cluster_of == c]) for c in range(max(labels) + 1)]
    return {
        "before": _score_before_clusters(fitted),
        "after": mean(fitted.scores_),
        "per_cluster": per_cluster,
    }


def _score_before_clusters(fitted: ClusteringProtocol) -> Any:
    """Return the metric in the round of the first split, else in the last round of one model."""
    metric = fitted.metric_
    for line in fitted.history_:
        if line.get("splits"):
            if line[metric] is not None:
                return line[metric]
            break  # that round was not evaluated
    shared = list(takewhile(lambda line: line["clusters"] == 1, fitted.history_))
    return shared[-1][metric] if shared else None


def line_text(line: dict[str, Any], total: int) -> str:
    """Return one round as one printed line."""
    parts = [f"round {line['round']:>3}/{total}", f"clusters {line['clusters']}"]
    for metric in METRICS:
        if line.get(metric) is not None:
            parts.append(f"{metric} {shown(line[metric], metric)}")
    if "ari" in line:
        parts.append(f"ARI {line['ari']:.2f}")
    split_tests = line.get("split_tests")
    if split_tests:
        ratios = [_norm_ratio(test) for test in split_tests]
        parts.append("‖mean‖/max " + " ".join(_first(ratios, MOST_RATIOS)))
    parts.append(f"up {megabytes(line['up'])} down {megabytes(line['down'])}")
    splits = [_split_text(one, two) for _, one, two in line.get("splits", [])]
    parts += _first(splits, MOST_SPLITS)
    if line.get("clustered"):
        parts.append(f"[bold]clustered into {_sizes(line['clustered'])}[/bold]")
    if "lambda" in line:
        parts.append(_threshold_text(line))
    return "  ".join(parts)


def _norm_ratio(test: dict[str, Any]) -> str:
    """Return the norm of a cluster's mean update over the largest norm of its updates."""
    if not test["max_norm"]:
        return "0.00"
    return f"{test['mean_norm'] / test['max_norm']:.2f}"


def _split_text(one: Sequence[int], two: Sequence[int]) -> str:
    return f"[bold]split {len(one) + len(two)} into {len(one)} + {len(two)}[/bold]"


def _threshold_text(line: dict[str, Any]) -> str:
    """Return λ of a graph of models, and whether it joins anyone."""
    text = f"λ {line['lambda']:.3g}"
    edges = line.get("edges")
    if edges and edges[0] > line["lambda"]:
        text += f" joins nobody: the nearest models are {edges[0]:.3g} apart"
    return text


def _sizes(clusters: list[list[int]]) -> str:
    """Return the sizes of clusters, the largest first: "5 + 5 + 3"."""
    sizes = [str(size) for size in sorted(map(len, clusters), reverse=True)]
    text = " + ".join(_first(sizes, MOST_CLUSTERS))
    if len(sizes) > MOST_CLUSTERS:
        text += f" ({len(sizes)} clusters)"
    return text


def _first(texts: list[str], most: int) -> list[str]:
    """Return the first `most` texts, and an ellipsis where there are more."""
    if len(texts) <= most:
        return texts
    return [*texts[:most], "…"]


def megabytes(count: int) -> str:
    """Return bytes for reading: kB and MB are 10³ and 10⁶ bytes."""
    if count >= 1e6:
        return f"{count / 1e6:.2f} MB"
    return f"{count / 1e3:.1f} kB"


def show(content: dict[str, Any], folder: Path, names: tuple[str, ...]) -> None:
    """Print the closing tables."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)  # clients' names are theirs, and no markup
    names = tuple(printable(name) for name in names)
    _show_clusters(console, content, names)
    _show_scores(console, content)
    _show_bytes(console, content["bytes"])
    privacy_report.show(console, content["privacy"])
    _show_dropped(console, content["dropped"])
    console.print(
        f"{content['seconds']:.1f} s on {content['device']}; everything is in {folder}",
        soft_wrap=True,
    )


def _show_scores(console: Any, content: dict[str, Any]) -> None:
    scores = content["metrics"]
    metric, unit = content["metric"], content["unit"]
    before = shown(scores[metric]["before"], metric, unit)
    after = shown(scores[metric]["after"], metric, unit)
    at_target = ""
    if scores["at_target"] is not None:
        share = number(scores["at_target"])
        at_target = f"share of clients at {content['target']:g}: {share}; "
    exact = "–" if scores["exact"] is None else scores["exact"]
    console.print(
        f"{metric} before clusters {before}, after {after}; {at_target}"
        f"ARI {number(scores['ari'])}, NMI {number(scores['nmi'])}, purity "
        f"{number(scores['purity'])}, exact {exact}"
    )


def _show_dropped(console: Any, dropped: dict[str, list[int]]) -> None:
    """Print in which rounds clients did not reply."""
    if not dropped:
        return
    clients = [f"{printable(name)}: {_few(rounds)}" for name, rounds in dropped.items()]
    console.print("did not reply (client: rounds): " + "; ".join(_first(clients, MOST_CLUSTERS)))


def _show_bytes(console: Any, sent: dict[str, Any]) -> None:
    """Print bytes by message, with a column for what went between servers if anything did."""
    from rich.table import Table

    headings = {"up": "up", "down": "down"}
    if sent.get("servers"):
        headings["servers"] = "between servers"
    table = Table("message", title="bytes on the wire")
    for heading in headings.values():
        table.add_column(heading, justify="right")
    for name, counts in [*sent["by_message"].items(), ("all", sent)]:
        cells = [f"{counts.get(way, 0):,}" for way in headings]
        table.add_row(name, *cells)
    console.print(table)


def _show_clusters(console: Any, content: dict[str, Any], names: tuple[str, ...]) -> None:
    """Print a table of the first clusters."""
    from rich.table import Table

    handed = content.get("fallback", {}).get("nodes")
    headings = ["cluster", "clients", "true clusters in it", content["metric"]]
    if handed:
        headings.append("model of")
    run = f"{content['protocol']} on {printable(content['data'])} ({content['scenario']})"
    table = Table(title=f"{run}, {content['clients']} clients")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for cluster in range(min(content["clusters"], MOST_CLUSTERS)):
        cells = _cluster_cells(content, names, cluster)
        if handed:
            cells.append(_model_of(handed[cluster], content["leaves"][cluster]))
        table.add_row(*cells)
    console.print(table)
    rest = content["clusters"] - MOST_CLUSTERS
    if rest > 0:
        console.print(f"… and {rest} more clusters in result.json")


def _cluster_cells(content: dict[str, Any], names: tuple[str, ...], cluster: int) -> list[str]:
    """Return a cluster's number, clients, true clusters and metric."""
    metric = content["metric"]
    members = [i for i, label in enumerate(content["labels"]) if label == cluster]
    clients = _few(names[i] for i in members)
    true_clusters = "–"
    if content["truth"] is not None:
        true_clusters = _few(sorted({content["truth"][i] for i in members}))
    score = content["metrics"][metric]["per_cluster"][cluster]
    return [str(cluster), clients, true_clusters, shown(score, metric)]


def _model_of(node: int, leaf: int) -> str:
    """Say which node's model a cluster has."""
    return "its own" if node == leaf else f"node {node}"


def _few(things: Iterable[Any]) -> str:
    """Return things for a cell of a table, the first of many."""
    texts = [str(thing) for thing in things]
    text = " ".join(texts[:MOST_NAMES])
    if len(texts) > MOST_NAMES:
        text += f" … ({len(texts)})"
    return text

"""What a finished run says: result.json, models, and the closing table."""

from __future__ import annotations

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


def result(
    plan: RunPlan, federation: Federation, fitted: ClusteringProtocol, state: Any
) -> dict[str, Any]:
    """The content of result.json.

    Args:
        state: the server's final state. From its parameter tree, where it has one, come each
            cluster's leaf (`leaves`) and the node whose model it was handed in the end, with the
            validation losses that decided (`fallback`).
    """
    labels = [int(c) for c in fitted.labels_]
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
        "truth": None if federation.truth is None else list(federation.truth),
        "dropped": {federation.names[i]: rounds for i, rounds in fitted.dropped_.items()},
        "rounds": fitted.rounds,
        "metrics": {
            **(fitted.agreement_ or {"ari": None, "nmi": None, "purity": None, "exact": None}),
            fitted.metric_: _judged(fitted, labels),
            "at_target": share_at(fitted.scores_, plan.settings.target)
            if federation.objective.higher
            else None,
        },
        "metric": fitted.metric_,
        "unit": federation.objective.unit,
        "target": plan.settings.target,
        **_nodes(state, max(labels) + 1),
        "observer": True,
        "bytes": fitted.bytes_,
        "privacy": privacy_report.section(fitted),
        "seconds": round(fitted.seconds_, 3),
    }


def _nodes(state: Any, clusters: int) -> dict[str, Any]:
    tree, handed = getattr(state, "tree", None), getattr(state, "handed", None)
    found: dict[str, Any] = (
        {} if tree is None else {"leaves": [tree.leaf(c) for c in range(clusters)]}
    )
    return (
        found
        if handed is None
        else {**found, "fallback": {"nodes": handed.nodes, "losses": handed.losses}}
    )


def _judged(fitted: ClusteringProtocol, labels: list[int]) -> dict[str, Any]:
    """The metric, before the first clusters and at the end."""
    shared = [
        line[fitted.metric_]
        for line in takewhile(lambda line: line["clusters"] == 1, fitted.history_)
    ]
    first_split = next(
        (line[fitted.metric_] for line in fitted.history_ if line.get("splits")), None
    )
    before = first_split if first_split is not None else (shared[-1] if shared else None)
    per = [mean(fitted.scores_[np.asarray(labels) == c]) for c in range(max(labels) + 1)]
    return {"before": before, "after": mean(fitted.scores_), "per_cluster": per}


def line_text(line: dict[str, Any], total: int) -> str:
    """One round as one printed line."""
    parts = [f"round {line['round']:>3}/{total}", f"clusters {line['clusters']}"]
    for metric in METRICS:
        if line.get(metric) is not None:
            parts.append(f"{metric} {shown(line[metric], metric)}")
    if "ari" in line:
        parts.append(f"ARI {line['ari']:.2f}")
    looks = line.get("looks") or []
    if looks:
        shares = [
            f"{look['mean_norm'] / look['max_norm'] if look['max_norm'] else 0:.2f}"
            for look in looks
        ]
        parts.append("‖mean‖/max " + " ".join(_first(shares, 8)))
    parts.append(f"up {megabytes(line['up'])} down {megabytes(line['down'])}")
    splits = [
        f"[bold]split {len(one) + len(two)} into {len(one)} + {len(two)}[/bold]"
        for _, one, two in line.get("splits", [])
    ]
    clustered = (
        [f"[bold]clustered into {_sizes(line['clustered'])}[/bold]"]
        if line.get("clustered")
        else []
    )
    return "  ".join(parts + _first(splits, 4) + clustered + _reach(line))


def _reach(line: dict[str, Any]) -> list[str]:
    """λ of a graph of models, and whether it joins anyone."""
    edges = line.get("edges") or []
    alone = (
        f" joins nobody: the nearest models are {edges[0]:.3g} apart"
        if edges and edges[0] > line["lambda"]
        else ""
    )
    return [f"λ {line['lambda']:.3g}{alone}"] if "lambda" in line else []


def _sizes(clusters: list[list[int]]) -> str:
    """5 + 5 + 3, the largest first."""
    sizes = [str(size) for size in sorted(map(len, clusters), reverse=True)]
    return " + ".join(_first(sizes, 12)) + (f" ({len(sizes)} clusters)" if len(sizes) > 12 else "")


def _first(texts: list[str], most: int) -> list[str]:
    return texts if len(texts) <= most else [*texts[:most], "…"]


def megabytes(count: int) -> str:
    """Bytes for reading: kB and MB are 10³ and 10⁶ bytes."""
    return f"{count / 1e6:.2f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def show(content: dict[str, Any], folder: Path, names: tuple[str, ...]) -> None:
    """Print the closing tables."""
    from rich.console import Console

    console = Console(markup=False, highlight=False)  # clients' names are theirs, and no markup
    names = tuple(map(printable, names))
    score = content["metrics"]
    metric, unit = content["metric"], content["unit"]
    before, after = (shown(score[metric][when], metric, unit) for when in ("before", "after"))
    reached = (
        ""
        if score["at_target"] is None
        else f"share of clients at {content['target']:g}: {number(score['at_target'])}; "
    )
    _show_clusters(console, content, names)
    exact = "–" if score["exact"] is None else score["exact"]
    console.print(
        f"{metric} before clusters {before}, after {after}; {reached}"
        f"ARI {number(score['ari'])}, NMI {number(score['nmi'])}, purity "
        f"{number(score['purity'])}, exact {exact}"
    )
    _show_bytes(console, content["bytes"])
    privacy_report.show(console, content["privacy"])
    if content["dropped"]:
        dropped = content["dropped"].items()
        lost = [f"{printable(name)}: {_few(list(map(str, rounds)))}" for name, rounds in dropped]
        console.print("did not reply (client: rounds): " + "; ".join(_first(lost, 12)))
    console.print(
        f"{content['seconds']:.1f} s on {content['device']}; everything is in {folder}",
        soft_wrap=True,
    )


def _show_bytes(console: Any, sent: dict[str, Any]) -> None:
    """Bytes by message; what went between servers has a column where there are such bytes."""
    from rich.table import Table

    ways = ["up", "down", *(["servers"] if sent.get("servers") else [])]
    table = Table("message", title="bytes on the wire")
    for way in ways:
        table.add_column("between servers" if way == "servers" else way, justify="right")
    for name, counts in [*sent["by_message"].items(), ("all", sent)]:
        table.add_row(name, *(f"{counts.get(way, 0):,}" for way in ways))
    console.print(table)


def _show_clusters(console: Any, content: dict[str, Any], names: tuple[str, ...]) -> None:
    from rich.table import Table

    data = printable(content["data"])
    clusters = Table(
        title=f"{content['protocol']} on {data} ({content['scenario']}), {content['clients']} "
        "clients"
    )
    handed = content.get("fallback", {}).get("nodes")
    for heading in (
        "cluster",
        "clients",
        "true clusters in it",
        content["metric"],
        *(["model of"] if handed else []),
    ):
        clusters.add_column(heading, overflow="fold")
    for c in range(content["clusters"])[:12]:
        members = [i for i, label in enumerate(content["labels"]) if label == c]
        true = (
            "–"
            if content["truth"] is None
            else _few(list(map(str, sorted({content["truth"][i] for i in members}))))
        )
        own = content["metrics"][content["metric"]]["per_cluster"][c]
        row = [str(c), _few([names[i] for i in members]), true, shown(own, content["metric"])]
        clusters.add_row(
            *row,
            *(
                [f"node {handed[c]}" if handed[c] != content["leaves"][c] else "its own"]
                if handed
                else []
            ),
        )
    console.print(clusters)
    if content["clusters"] > 12:
        console.print(f"… and {content['clusters'] - 12} more clusters in result.json")


def _few(names: list[str]) -> str:
    return " ".join(names[:20]) + (f" … ({len(names)})" if len(names) > 20 else "")

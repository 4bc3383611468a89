"""The report of a finished run: result.json, the lines of its rounds, and the closing tables."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from securecluster.core.number_format import number, shown
from securecluster.core.progress import duration
from securecluster.data.feature_columns import listed
from securecluster.folders.schemas import Result, Sent, Stopped, scores_of
from securecluster.models.objectives import METRICS
from securecluster.parties.derived import chosen_sentence
from securecluster.reports import privacy_report, score_table, terminal

MOST_CLUSTERS = 12  # rows of the closing table, and sizes or clients in a line
MOST_NAMES = 20  # clients or true clusters in a cell
MOST_RATIOS = 8  # split tests in the line of a round
LONG = 30.0  # seconds from which on the time left is of interest
MOST_SPLITS = 4  # splits in the line of a round
Entries = dict[str, Any]
Line = dict[str, Any]


def line_text(line: Line, total_rounds: int, remaining: float = 0.0) -> str:
    """Return one round as one printed line.

    Args:
        line: of history.jsonl.
        total_rounds: the number of rounds of the run.
        remaining: seconds that are left, which are shown of runs that take long.
    """
    phrases = [f"round {line['round']:>3}/{total_rounds}"]
    phrases.append(f"clusters {line['clusters']}")
    # a line has the metric of its data only, and none in rounds without evaluation
    for metric in METRICS:
        if line.get(metric) is not None:
            value = shown(line[metric], metric)
            phrases.append(f"{metric} {value}")
    if "ari" in line:
        phrases.append(f"ARI {line['ari']:.2f}")
    if line.get("split_tests"):
        phrases.append(_norm_ratios(line["split_tests"]))
    up = megabytes(line["up"])
    down = megabytes(line["down"])
    phrases.append(f"up {up} down {down}")
    phrases += _split_texts(line.get("splits", []))
    if line.get("clustered"):
        phrases.append(f"[bold]clustered into {_sizes(line['clustered'])}[/bold]")
    if "lambda" in line:
        phrases.append(_threshold_text(line))
    if remaining > LONG:
        phrases.append(f"{duration(remaining)} left")
    return "  ".join(phrases)


def _norm_ratios(split_tests: list[Entries]) -> str:
    """Return for each cluster ‖mean update‖ / max ‖update‖, the ratio that CFL's test compares.

    Args:
        split_tests: of the clusters that were tested in one round.
    """
    ratios = []
    for test in split_tests:
        ratio = 0.0
        # a largest norm of 0 leaves no ratio
        if test["max_norm"]:
            ratio = test["mean_norm"] / test["max_norm"]
        ratios.append(f"{ratio:.2f}")
    return "mean/longest update " + " ".join(_first(ratios, MOST_RATIOS))


def _split_texts(splits: list[Any]) -> list[str]:
    """Return each split in words.

    Args:
        splits: for each the members of the cluster, and of both halves.
    """
    texts = []
    for _, one, two in splits:
        sizes = f"{len(one)} + {len(two)}"
        texts.append(f"[bold]split {len(one) + len(two)} into {sizes}[/bold]")
    return _first(texts, MOST_SPLITS)


def _threshold_text(line: Line) -> str:
    """Return the threshold λ of a graph of models, and whether it joins any clients."""
    text = f"λ {line['lambda']:.3g}"
    edges = line.get("edges")
    # edges are ascending: the first is the distance of the nearest models
    if edges and edges[0] > line["lambda"]:
        text += f" joins nobody: the nearest models are {edges[0]:.3g} apart"
    return text


def _sizes(clusters: list[list[int]]) -> str:
    """Return the sizes of clusters, the largest first: "5 + 5 + 3".

    Args:
        clusters: the members of each cluster.
    """
    sizes = sorted(map(len, clusters), reverse=True)
    texts = [str(size) for size in sizes]
    text = " + ".join(_first(texts, MOST_CLUSTERS))
    if len(sizes) > MOST_CLUSTERS:
        text += f" ({len(sizes)} clusters)"
    return text


def _first(texts: list[str], maximum: int) -> list[str]:
    """Return the first texts, with an ellipsis where there are more than the maximum."""
    if len(texts) <= maximum:
        return texts
    return [*texts[:maximum], "…"]


def megabytes(count: int) -> str:
    """Return a number of bytes as text, in kB (10³ bytes) or MB (10⁶ bytes).

    Args:
        count: of bytes.
    """
    if count >= 1e6:
        return f"{count / 1e6:.2f} MB"
    return f"{count / 1e3:.1f} kB"


def show(content: Result, folder: Path) -> None:
    """Print the closing tables.

    Args:
        content: content of result.json.
        folder: of the run.
    """
    # names of clients may contain what looks like markup
    console = terminal.Console(markup=False)
    _show_clusters(console, content)
    _show_scores(console, content)
    _show_classes(console, content)
    console.print(terminal.table(*bytes_table(content["bytes"]), "bytes on the wire", numbers=True))
    privacy_report.show(console, content["privacy"])
    if "stopped" in content:
        console.print(f"stopped {early_end(content['stopped'])}")
    if "chosen" in content:
        console.print(chosen_sentence(content["chosen"]))
    for sentence in content.get("power", {"sentences": []})["sentences"]:
        console.print(f"power check: {sentence}")
    for entry in content.get("theory", []):
        console.print(f"theory: {entry['sentence']}")
    _show_rounds(console, "did not reply", content["dropped"])
    unseen = content.get("never_seen", {})
    _show_rounds(console, "released unseen, perhaps, and counted all the same", unseen)
    _show_refused(console, content.get("refused", {}))
    for name, value in content.get("fields", {}).items():
        console.print(f"{name}: {value}")
    time = f"{content['seconds']:.1f} s on {content['device']}"
    # no wrapping: a path with line breaks in it could not be copied
    console.print(f"{time}; everything is in {folder}", soft_wrap=True)


def early_end(stopped: Stopped) -> str:
    """Return after which round a run was stopped, and by whom, in words."""
    return f"after round {stopped['round']} by {stopped['reason']}"


def _show_scores(console: Any, content: Result) -> None:
    """Print the metric before and after, and the agreement with the true clusters.

    Args:
        console: rich's.
        content: content of result.json.
    """
    metrics = content["metrics"]
    scores = scores_of(content)
    metric = content["metric"]
    unit = content["unit"]
    before = shown(scores["before"], metric, unit)
    after = shown(scores["after"], metric, unit)
    text = f"{metric} before clusters {before}, after {after}; "
    if metrics["at_target"] is not None:
        share = number(metrics["at_target"])
        text += f"share of clients at {content['target']:g}: {share}; "
    agreement = (("ARI", metrics["ari"]), ("NMI", metrics["nmi"]), ("purity", metrics["purity"]))
    for heading, value in agreement:
        text += f"{heading} {number(value)}, "
    exact = "–" if metrics["exact"] is None else metrics["exact"]
    console.print(f"{text}exact {exact}")
    below = scores.get("below_baseline", [])
    if below:
        names = listed(below, MOST_NAMES)
        console.print(f"worse than the baseline, which knows training targets alone: {names}")


def _show_classes(console: Any, content: Result) -> None:
    """Print the number and the name of each class or target, where these have names.

    Args:
        console: rich's.
        content: content of result.json.
    """
    names = content.get("class_names", [])
    if names:
        texts = [f"{k} {name!r}" for k, name in enumerate(names)]
        console.print(f"{score_table.outputs_of(content['metric'])}: {listed(texts, MOST_NAMES)}")


def _show_rounds(console: Any, what: str, by_client: dict[str, list[int]]) -> None:
    """Print in which rounds something happened to clients.

    Args:
        console: rich's.
        what: happened.
        by_client: rounds by the client's name.
    """
    if not by_client:
        return
    clients = []
    for name, rounds in by_client.items():
        clients.append(f"{name}: {_few(rounds)}")
    text = "; ".join(_first(clients, MOST_CLUSTERS))
    console.print(f"{what} (client: rounds): {text}")


def _show_refused(console: Any, refused: dict[str, dict[str, list[int]]]) -> None:
    """Print in which rounds clients refused, and why.

    Args:
        console: rich's.
        refused: rounds by the client's name and the code of its refusal.
    """
    clients = []
    for name, codes in refused.items():
        clients += [f"{name}: {_few(rounds)} ({code})" for code, rounds in codes.items()]
    if clients:
        text = "; ".join(_first(clients, MOST_CLUSTERS))
        console.print(f"refused (client: rounds): {text}")


def bytes_table(sent: Sent) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of bytes by message, those between servers where there are any.

    Args:
        sent: `bytes` of result.json.
    """
    headings = {"up": "up", "down": "down"}
    if sent.get("servers"):
        headings["servers"] = "between servers"
    counts: dict[str, Any] = {**sent["by_message"], "all": sent}
    rows = []
    for name, byte_counts in counts.items():
        rows.append([name, *(f"{byte_counts.get(direction, 0):,}" for direction in headings)])
    return ["message", *headings.values()], rows


def _show_clusters(console: Any, content: Result) -> None:
    """Print a table of the first clusters.

    Args:
        console: rich's.
        content: content of result.json.
    """
    model_nodes: list[int] = []
    if "fallback" in content:
        model_nodes = content["fallback"]["nodes"]
    headings = ["cluster", "clients", "true clusters in it", content["metric"]]
    if "baseline_per_cluster" in scores_of(content):
        headings.append("baseline")
    if model_nodes:
        headings.append("model of")
    rows = []
    for cluster in range(min(content["clusters"], MOST_CLUSTERS)):
        cells = _cluster_cells(content, cluster)
        if model_nodes:
            leaf = content["leaves"][cluster]
            cells.append(_model_of(model_nodes[cluster], leaf))
        rows.append(cells)
    run = f"{content['protocol']} on {content['data']} ({content['scenario']})"
    console.print(terminal.table(headings, rows, f"{run}, {content['clients']} clients"))
    remaining = content["clusters"] - MOST_CLUSTERS
    if remaining > 0:
        console.print(f"… and {remaining} more clusters in result.json")


def _cluster_cells(content: Result, cluster: int) -> list[str]:
    """Return a cluster's number, clients, true clusters and metric, with the baseline if known.

    Args:
        content: content of result.json.
        cluster: its label.
    """
    members = []
    for client, label in enumerate(content["labels"]):
        if label == cluster:
            members.append(client)
    clients = _few(content["names"][client] for client in members)
    true_clusters = "–"
    truth = content["truth"]
    if truth is not None:
        labels: set[Any] = {truth[client] for client in members}
        true_clusters = _few(sorted(labels))
    scores = scores_of(content)
    values = [scores["per_cluster"][cluster]]
    if "baseline_per_cluster" in scores:
        values.append(scores["baseline_per_cluster"][cluster])
    texts = [shown(value, content["metric"]) for value in values]
    return [str(cluster), clients, true_clusters, *texts]


def _model_of(node: int, leaf: int) -> str:
    """Return in words which node's model a cluster has.

    Args:
        node: of the parameter tree, whose model the cluster has.
        leaf: the cluster's own node.
    """
    if node == leaf:
        return "its own"
    return f"node {node}"


def _few(values: Iterable[Any]) -> str:
    """Return values for a cell of a table; of many only the first and their number."""
    texts = [str(value) for value in values]
    text = " ".join(texts[:MOST_NAMES])
    if len(texts) > MOST_NAMES:
        text += f" … ({len(texts)})"
    return text

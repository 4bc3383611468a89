"""Types of config.json, result.json, compare.json and of a round's line, as commands read them.

Each file but compare.json, which nothing reads back, is checked once, when its folder is opened:
a folder from elsewhere may hold any values with digests that fit. Entries that a protocol adds are
not listed, and may be anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from securecluster.core.serialization import Fault, checked, fault_of, refuse
from securecluster.models.objectives import METRICS


class RunConfig(TypedDict):
    """Content of a run's config.json; the options have classes of their own."""

    schema: int
    """number of the format"""
    version: str
    """of the package that wrote it"""
    protocol: dict[str, Any]
    """its name and options"""
    simulation: dict[str, Any] | None
    """data, scenario and clients; None of a federation made in Python"""
    settings: dict[str, Any]
    """those of `Settings`"""
    data_digest: str
    """of all clients' data, which `resume` and newcomers are checked by"""
    clients: list[str]
    """names, in the order of their numbers"""
    network: dict[str, Any]
    """what clients and server agreed on before the first round"""


class ComparisonConfig(TypedDict):
    """Content of a comparison's config.json."""

    schema: int
    """number of the format"""
    compare: list[str]
    """names of the protocols, each with a run folder below"""


class SweepConfig(TypedDict):
    """Content of a sweep's config.json."""

    schema: int
    """number of the format"""
    sweep: dict[str, Any]
    """protocols, levels, seeds and options"""
    data_digest: str
    """of all clients' data"""


class Scores(TypedDict):
    """Metric before the first clusters, at the end, and in each cluster at the end."""

    before: float | None
    """of the last model that all clients shared"""
    after: float | None
    """mean over clients at the end"""
    per_cluster: list[float | None]
    """mean over each cluster's clients at the end"""
    baseline: NotRequired[float | None]
    """mean over clients of the same metric of an answer that knows the client's training targets
    alone: its most frequent label, shares of tokens, or mean"""
    baseline_per_cluster: NotRequired[list[float | None]]
    """mean over each cluster's clients"""
    below_baseline: NotRequired[list[str]]
    """names of clients whose model is worse than theirs"""


class Metrics(TypedDict):
    """Agreement with the true clusters; the scores stand beside it under the metric's name."""

    ari: float | None
    """adjusted Rand index"""
    nmi: float | None
    """normalized mutual information"""
    purity: float | None
    """share of clients whose true cluster is the most frequent one of their cluster"""
    exact: bool | None
    """whether both have the same groups"""
    at_target: float | None
    """share of clients whose score reaches `target`"""


class Counts(TypedDict):
    """Bytes of one message."""

    up: int
    """from clients"""
    down: int
    """to clients"""
    servers: NotRequired[int]
    """between servers"""


class Sent(TypedDict):
    """Bytes on the wire."""

    up: int
    """from clients"""
    down: int
    """to clients"""
    servers: int
    """between servers"""
    by_message: dict[str, Counts]
    """the same, by the client method that a message calls"""


class Mask(TypedDict):
    """Mask of a run."""

    kind: str
    """as `--mask` names it"""
    padding_bytes: int
    """that it adds to every row"""


class Field(TypedDict):
    """Field of clients' replies, as its reader received it."""

    method: str
    """the client method"""
    field: str
    """of the method's reply"""
    verb: str
    """how it is read: gather (one by one), sum or pairs"""
    reader: str
    """server, lps (the client's local parameter server) or client (sealed for others)"""
    mechanism: str
    """exact, gaussian, skellam, free or public"""
    derived: bool
    """computed from earlier releases alone"""
    masked: bool
    """a mask covers it"""
    central: bool
    """the server that reads it adds its noise"""
    summed: bool
    """its reader has sums over several clients only"""
    paired: NotRequired[bool]
    """its reader has sums of pairs only"""
    encrypted: NotRequired[str]
    """what a key authority releases of it: sums, matrix or labels; empty without one"""


class PricedRelease(TypedDict):
    """Releases of one kind."""

    method: str
    """the client method"""
    field: str
    """of its reply"""
    mechanism: str
    """as in `fields`"""
    noise_multiplier: float | None
    """σ over the clip norm"""
    times: int
    """of the client with the most"""


class UnsharedModels(TypedDict):
    """Clusters without a shared model, and the file with their clients' own."""

    labels: list[int]
    """of the clusters"""
    file: str
    """that holds their clients' own models"""


class OverRounds(TypedDict):
    """Numbers that secure sums tell over all rounds."""

    sentence: str
    """the same in words"""
    rank: int
    """number of independent lists of clients"""
    solvable: int
    """clients whose row is a combination of sums"""


class Occupied(TypedDict):
    """Counts of members that moved the coordinates of one field, over all of its hidden sums."""

    method: str
    """the client method"""
    field: str
    """of its reply"""
    sums: int
    """that were formed"""
    coordinates: int
    """of all sums together"""
    of_one: int
    """coordinates that one member alone moved"""
    of_few: int
    """coordinates that one or two members moved"""
    blocks: int
    """that a member filled; rows, where the field has no blocks"""
    blocks_of_one: int
    """blocks that one member alone filled"""
    least_members: int
    """of the block that fewest filled"""


class SmallestSums(TypedDict):
    """The smallest secure sums of a run, and what their members read of each other."""

    sentence: str
    """the same in words"""
    members: int
    """of the smallest sum"""
    clients: int
    """how many were in a sum of so few"""


class WithEarlier(TypedDict):
    """What a run costs with the earlier one from whose models it started."""

    epsilon: float | None
    """of both runs; null is ∞"""
    clients: int
    """in both, by their names"""
    sentence: str
    """the same in words"""


class Privacy(TypedDict):
    """Section `privacy` of result.json."""

    masks: list[Mask]
    """in the order of the run"""
    server_view: list[str]
    """what the server saw, in sentences"""
    lps_view: NotRequired[list[str]]
    """what local parameter servers saw"""
    authority_view: NotRequired[list[str]]
    """what the key authority saw"""
    client_view: NotRequired[list[str]]
    """what clients saw of others"""
    query_view: NotRequired[list[str]]
    """what requests brought to clients"""
    unseen: NotRequired[list[str]]
    """what the server did not see"""
    over_rounds: NotRequired[OverRounds]
    """what secure sums tell together"""
    smallest_sums: NotRequired[SmallestSums]
    """what members of the smallest ones read of each other"""
    unprotected: NotRequired[list[str]]
    """what went without mask or noise"""
    fields: list[Field]
    """all that clients sent"""
    occupancy: NotRequired[list[Occupied]]
    """what members of exact hidden sums moved, where it was counted"""
    unshared_models: NotRequired[UnsharedModels]
    """clusters whose clients trained alone, under noise"""
    tuned_models: NotRequired[str]
    """that clients tuned their models after the run"""
    reproducible_keys: bool
    """keys and noise follow from the seed: nothing is protected"""
    epsilon: float | None
    """of everything released, for one unit of privacy against blanks in its place; null is ∞"""
    epsilon_rdp: float | None
    """the same, bounded by Rényi divergences"""
    epsilon_replace: float | None
    """the same against any other data in its place"""
    delta: float | None
    """of (ε, δ)"""
    accountant: str
    """origin of `epsilon`: nothing released, exact release, exact Gaussian, rare batches, known
    batches, PRV or RDP"""
    unit: str
    """of privacy: client or example"""
    neighbouring: str
    """the two worlds that ε is about"""
    placement: str
    """who adds the noise"""
    together: NotRequired[WithEarlier]
    """with the earlier run that it started from"""
    releases: list[PricedRelease]
    """from which ε is computed"""
    free: NotRequired[list[str]]
    """releases that cost nothing, and why"""
    declared_public: NotRequired[list[str]]
    """fields that the protocol says are of nobody's data"""
    exact: list[str]
    """releases without noise, for which ε is ∞"""
    assumed: NotRequired[list[str]]
    """what the guarantee takes for granted"""
    not_covered: list[str]
    """what ε leaves out"""
    uncovered_files: NotRequired[list[str]]
    """files that hold what ε does not cover"""


class Fallback(TypedDict):
    """Node of the parameter tree whose model each cluster has."""

    nodes: list[int]
    """one for each cluster"""
    losses: list[dict[str, float]]
    """for each cluster: by node on its path, the mean loss on held-out samples"""


# an entry that is a word of Python
_Lambda = TypedDict("_Lambda", {"lambda": NotRequired[float]})


class TheoryEntry(_Lambda):
    """What a paper's theory says of a split of CFL, or of the first clusters of SR-FCA."""

    sentence: str
    """all of it in words"""
    round: NotRequired[int]
    """of the split"""
    members: NotRequired[int]
    """number of clients that were split"""
    gamma: NotRequired[float]
    """γ̂: the sine of a client's largest angle from the cluster in which it ended"""
    noise: NotRequired[float]
    """norm of privacy's noise in a row, over that of the row without it"""
    allowed: NotRequired[float]
    """γ below which the split is right (Sattler et al. 2019, eq. 39)"""
    clusters: NotRequired[int]
    """number of clusters in which the clients ended"""
    guaranteed: NotRequired[float]
    """γ below which Theorem 1 guarantees a separation gap for so many clusters"""
    within: NotRequired[float]
    """largest distance of two models of a first cluster"""
    across: NotRequired[float]
    """smallest distance of two models of different first clusters"""
    aside: NotRequired[list[int]]
    """clients with odd models, which λ does not depend on"""


class PowerOfRelease(TypedDict):
    """Noise of one kind of release beside its largest signal."""

    method: str
    """the client method"""
    field: str
    """of its reply"""
    kind: str
    """what the rows are"""
    use: str
    """clusters or training"""
    numbers: int
    """of one row"""
    rows: float
    """clients whose rows are averaged in what is read; 1 where each is read by itself"""
    noise_over_signal: float
    """length of the noise by that of the largest signal"""
    carried_up_to: float
    """the most of it with which the use hardly suffers"""
    drowned_from: float
    """the least of it with which nothing is left"""
    verdict: str
    """carries (enough is left), doubtful, or drowned (lost in noise)"""


class PowerChange(TypedDict):
    """Change of a run by which more is carried."""

    change: str
    """options, as they are typed"""
    use: str
    """clusters or training"""
    ratio: float
    """`noise_over_signal` with them"""
    verdict: str
    """with them"""


class PowerEntry(TypedDict):
    """Check of what noise leaves of a private run, as `PowerCheck.as_json` has it."""

    summary: str
    """both verdicts in a few words"""
    clusters: str | None
    """verdict; null where the protocol looks for none"""
    training: str | None
    """verdict; null where nothing is trained"""
    sentences: list[str]
    """the same at length"""
    warning: str | None
    """where something drowns"""
    releases: list[PowerOfRelease]
    """of which the verdicts are made"""
    remedies: list[PowerChange]
    """what would carry"""


class Stopped(TypedDict):
    """Early end of a run, which a callback asked for."""

    round: int
    """the last one"""
    reason: str
    """which callback stopped it, and why"""


class Result(TypedDict):
    """Content of result.json."""

    protocol: str
    """its name"""
    data: str
    """its name"""
    scenario: str
    """how clients' data differ, as `--scenario` names it"""
    model: Any
    """its name, or the description of a module"""
    seed: int | None
    """of data, models and public draws; null where keys follow from it"""
    device: str
    """cpu or cuda"""
    version: str
    """of the package that wrote it"""
    clients: int
    """their number"""
    names: list[str]
    """of clients, in the order of all lists below"""
    class_names: NotRequired[list[Any]]
    """labels as they came, where these were no class numbers"""
    feature_names: NotRequired[list[str]]
    """columns, where the data had names"""
    clusters: int
    """number of clusters found"""
    labels: list[int]
    """each client's cluster, from 0"""
    truth: list[int] | list[str] | None
    """each client's true cluster, where known"""
    dropped: dict[str, list[int]]
    """rounds in which a client did not reply, by name"""
    never_seen: NotRequired[dict[str, list[int]]]
    """rounds of releases that a client was asked for and nobody saw, by name; ε counts them"""
    refused: NotRequired[dict[str, dict[str, list[int]]]]
    """rounds in which a client refused a request, by name and reason"""
    rounds: int
    """those asked for; each method says which they are"""
    stopped: NotRequired[Stopped]
    """where a callback ended the run before the last of them"""
    warning: NotRequired[str]
    """where clusters or models are not to be trusted"""
    metrics: Metrics
    """with the scores under the metric's name"""
    metric: str
    """accuracy, perplexity or position_error"""
    unit: str
    """of the metric"""
    target: float
    """of `at_target`"""
    leaves: NotRequired[list[int]]
    """of CFL: each cluster's leaf in the tree of splits"""
    fallback: NotRequired[Fallback]
    """of CFL with `--fallback`"""
    bytes: Sent
    """on the wire"""
    privacy: Privacy
    """who saw what, and ε"""
    chosen: NotRequired[dict[str, Any]]
    """options that a target ε chose, by name"""
    power: NotRequired[PowerEntry]
    """what noise leaves, as told before the run"""
    theory: NotRequired[list[TheoryEntry]]
    """of CFL and SR-FCA: what the papers' theory says of the clusters"""
    fields: NotRequired[dict[str, Any]]
    """report fields that installed packages declare, by name"""
    seconds: float
    """of the run"""


class SplitTest(TypedDict):
    """One cluster's split test in a round of CFL; what it decides by besides may be there, too."""

    cluster: NotRequired[int]
    """its label"""
    members: NotRequired[int]
    """number of clients that replied"""
    mean_norm: float
    """norm of the mean update"""
    max_norm: float
    """norm of the longest update"""
    gap: NotRequired[float | None]
    """separation gap of the halves; null where fewer than two clients replied"""
    split: NotRequired[bool]
    """whether the cluster was split"""


class RoundLine(_Lambda):
    """Line of history.jsonl, for a round; the metric stands besides, under its name.

    Each protocol may add entries of its own. Where no observer measures, as at a server whose
    clients are nodes elsewhere, lines have no scores.
    """

    loop: NotRequired[str]
    """part of the protocol that counts the rounds"""
    round: int
    """its number in the loop, from 1"""
    clusters: int
    """number of clusters after it"""
    up: int
    """bytes from clients so far"""
    down: int
    """bytes to clients so far"""
    ari: NotRequired[float]
    """adjusted Rand index with the true clusters, where these are known"""
    at_target: NotRequired[float | None]
    """share of clients whose score reaches the target"""
    lowest: NotRequired[float]
    """the lowest score of a client"""
    lower_quartile: NotRequired[float]
    """score of the client a quarter of the way from the lowest"""
    upper_quartile: NotRequired[float]
    """score of the client three quarters of the way from the lowest"""
    highest: NotRequired[float]
    """the highest score of a client"""
    gap: NotRequired[float | None]
    """of CFL: separation gap between the true clusters, which the observer computes"""
    split_tests: NotRequired[list[SplitTest] | None]
    """of CFL: tests of clusters"""
    splits: NotRequired[list[tuple[list[int], list[int], list[int]]]]
    """of CFL: members of a cluster, and of both its halves"""
    clustered: NotRequired[list[list[int]] | None]
    """members of each cluster, in a round that made them"""
    edges: NotRequired[list[float] | None]
    """of SR-FCA: lengths of the spanning tree's edges, ascending"""
    start: NotRequired[int]
    """of IFCA: which of its starts the round belongs to"""


class ComparisonRow(TypedDict):
    """Protocol of a comparison; numbers are null where it failed, or has none.

    The metric at the end stands besides, under its name, and that before the first clusters under
    the name with `_before`.
    """

    protocol: str
    """its name"""
    clusters: int | None
    """number of clusters found"""
    ari: float | None
    """adjusted Rand index with the true clusters"""
    at_target: float | None
    """share of clients whose score reaches `target`"""
    below_baseline: int | None
    """clients whose model is worse than what their training targets alone tell; the mean of that
    stands under the metric's name with `_baseline`"""
    scores: dict[str, float | None] | None
    """means over clients of further scores, by name"""
    given: dict[str, int] | None
    """options that gave it the number of clusters"""
    rounds: int | None
    """that it ran"""
    up: int | None
    """bytes from clients"""
    down: int | None
    """bytes to clients"""
    servers: int | None
    """bytes between servers"""
    epsilon: float | None
    """of its run, for one `dp_unit`; null is ∞"""
    dp_unit: str | None
    """client or example; null where nothing had noise"""
    seconds: float | None
    """of the run"""
    error: str | None
    """why it failed"""


class Together(TypedDict):
    """Cost of all runs of one unit of privacy, on the same clients."""

    unit: str
    """of privacy: client or example"""
    protocols: list[str]
    """whose runs had noise"""
    epsilon: float | None
    """of all their releases; null is ∞"""
    delta: float
    """of (ε, δ)"""
    accountant: str
    """origin of `epsilon`, as in result.json"""


class Comparison(TypedDict):
    """Content of compare.json."""

    data: str
    """its name"""
    scenario: str
    """how clients' data differ"""
    clients: int
    """their number"""
    true_clusters: int | None
    """their number, where known"""
    seed: int | None
    """of data and models; null where keys follow from it"""
    reproducible_keys: NotRequired[bool]
    """keys and noise follow from the seed: nothing is protected"""
    target: float
    """of `at_target`"""
    metric: str
    """accuracy, perplexity or position_error"""
    unit: str
    """of the metric"""
    protocols: list[ComparisonRow]
    """a row for each, in the order given"""
    together: list[Together]
    """what all runs cost, by unit of privacy"""


def checked_result(path: Path, content: Any) -> Result:
    """Return the content of result.json after a check of its types, and of what goes together.

    Args:
        path: of the file, for the message of an error.
        content: as it was parsed.

    Raises:
        RunFolderError: an entry that no run writes; the message names file and entry.
    """
    result = checked(path, content, Result)
    refuse(path, _fault_of_result(result))
    return result


def scores_of(result: Result) -> Scores:
    """Return the run's metric before the first clusters, at the end, and in each cluster."""
    metrics: Mapping[str, Any] = result["metrics"]
    scores: Scores = metrics[result["metric"]]
    return scores


def _fault_of_result(result: Result) -> Fault | None:
    """Return the first entry of result.json that does not go with the others."""
    fault = _fault_of_metric(result["metric"], result["metrics"])
    if fault is not None:
        return fault
    clients = len(result["names"])
    # where clients assign themselves, none may be in a cluster before the last
    clusters = max(result["clusters"], 1 + max(result["labels"], default=-1))
    lengths: dict[str, tuple[Sequence[Any], int]] = {
        "labels": (result["labels"], clients),
        "metrics per_cluster": (scores_of(result)["per_cluster"], clusters),
    }
    if "baseline_per_cluster" in scores_of(result):
        baselines = scores_of(result)["baseline_per_cluster"]
        lengths["metrics baseline_per_cluster"] = (baselines, clusters)
    if result["truth"] is not None:
        lengths["truth"] = (result["truth"], clients)
    if "fallback" in result:
        lengths["leaves"] = (result.get("leaves", []), clusters)
        lengths["fallback.nodes"] = (result["fallback"]["nodes"], clusters)
    for name, (items, length) in lengths.items():
        if len(items) != length:
            return f"{name} has {len(items)} items, not {length}"
    return _fault_of_epsilon(result["privacy"])


def _fault_of_metric(metric: str, metrics: Mapping[str, Any]) -> Fault | None:
    """Return what is wrong with the metric and its scores."""
    if metric not in METRICS:
        return f"metric is none of {', '.join(METRICS)}"
    if metric not in metrics:
        return f"metrics.{metric} is missing"
    return fault_of(metrics[metric], Scores, f"metrics.{metric}")


def _fault_of_epsilon(privacy: Privacy) -> Fault | None:
    """Return what is wrong with ε and what it has no meaning without."""
    epsilon = privacy["epsilon"]
    delta = privacy["delta"]
    if delta is not None and not 0 <= delta < 1:
        return "privacy.delta is no probability"
    if epsilon is None:
        return None
    if privacy["epsilon_rdp"] is None or delta is None:
        return "privacy.epsilon has no epsilon_rdp or no delta"
    if epsilon < 0:
        return "privacy.epsilon is negative"
    return None


def checked_lines(path: Path, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of a history after a check of their types.

    Args:
        path: of the file, for the message of an error.
        lines: a line for each round.

    Raises:
        RunFolderError: an entry that no run writes; the message names file and entry.
    """
    for position, line in enumerate(lines):
        entry = f"line {position + 1}"
        refuse(path, fault_of(line, RoundLine, entry))
        for metric in METRICS:
            number = float | None
            refuse(path, fault_of(line.get(metric), number, f"{entry}.{metric}"))
    return lines

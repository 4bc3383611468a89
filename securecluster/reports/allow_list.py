"""What may leave a run folder in a bundle: one list of every entry, at any depth.

Security rule: nothing leaves because no list names it. An entry that is not here stays, within
others, too, until somebody writes down whose it is. Entries and options of a protocol of an
author's own stay likewise.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias


class Whose(Enum):
    """Whom an entry tells of, which decides when it may leave."""

    PUBLIC = "public"
    """follows from options, declarations or releases"""
    LABELS = "labels"
    """clients' clusters: may leave where the server knows them, so that ε covers them"""
    UNCOVERED = "uncovered"
    """no ε covers it: may leave where the owner says so"""
    OWNER = "owner"
    """never leaves"""


@dataclass(frozen=True)
class FileName:
    """Path of a file, of which the name may leave: the folder belongs to the machine of the run."""


@dataclass(frozen=True)
class Each:
    """List of objects, or object with any names, whose values have one rule.

    Args:
        rule: of every value.
        named: True for an object.
    """

    rule: Rule
    named: bool = False


# of a value, what may leave of it; of several rules the first that fits. A leaf is no object.
Rule: TypeAlias = "Whose | FileName | Each | Mapping[str, Rule] | tuple[Rule, ...]"

PUBLIC, LABELS, UNCOVERED, OWNER = Whose
# an option, or the name of one that is an object of the user's own
OPTION: Rule = (PUBLIC, {"own": PUBLIC})
MODEL: Rule = (
    PUBLIC,
    {"own": PUBLIC},
    {"module": PUBLIC, "parameters": Each(PUBLIC, named=True), "weights": PUBLIC},
)


def _all(rule: Rule, names: str) -> dict[str, Rule]:
    """Return the same rule for several entries.

    Args:
        rule: of each.
        names: of the entries, with blanks between them.
    """
    return dict.fromkeys(names.split(), rule)


# options of the protocols of this project
OPTIONS: dict[str, Rule] = {
    **_all(
        OPTION,
        "aggregation angle average batch_size batches clip cluster_noise cluster_rounds "
        "cluster_share clusterer clustering_batches cohort_size common components compress "
        "criterion delta descriptor_clip descriptor_noise directions distance dp_unit epochs eps "
        "eps1 eps2 evidence exact_weights fallback features first_noise floor gamma_max gps_every "
        "gradient_noise gram_mechanism gram_noise grid height init k keep_momentum landmarks layer "
        "layer_mask least_choosers least_members level linkage local_rounds loss_clip loss_noise "
        "lost colluding "
        "lr mask metric min_samples min_size minimum_size moments momentum networks newcomers_by "
        "noise optimizer scale_noise class_weight ditto accumulate keep_best local_layers lr_gamma "
        "lr_schedule lr_step proximal weight_decay "
        "participation period placement points positions pre_rounds public quantile radius "
        "radius_scale rebalance refine regularization relevance relevance_release residuals "
        "retrain rounds sealed selection_noise selection_share signature signature_blocks "
        "signature_centre signature_noise signature_releases signature_size similarity size sketch "
        "stable_rounds start_rounds starts step stride subspaces sum_bound synthetic "
        "target_epsilon tasks threshold tree trim tune_rounds variant vectors walks",
    ),
    "model": MODEL,
    "start": (PUBLIC, {**_all(PUBLIC, "earlier models weights"), "ledger": OWNER}),
}
# what clients and server agreed on
NETWORK: Rule = {
    **OPTIONS,
    **_all(
        PUBLIC,
        "schema wire protocol dtype dimension shape classes feature_names class_names clients "
        "width latents shared phi signature_kind",
    ),
    "objective": _all(PUBLIC, "kind metres loss delta bounds standardised"),
    "scaling": (PUBLIC, _all(PUBLIC, "kind low high categories counted channels")),
    "chosen": OPTIONS,
    # clients' numbers of samples
    **_all(UNCOVERED, "sizes signature_sizes most_samples"),
    # with it a simulation's data can be made again
    "seed": OWNER,
    # on many machines, where seeds follow from clients' nonces
    **_all(OWNER, "nonces proposed_seed cohort_seed"),
}
CONFIG: Rule = {
    **_all(PUBLIC, "schema version"),
    "protocol": {"name": PUBLIC, **OPTIONS},
    "simulation": (
        PUBLIC,  # null of data from Python
        {
            "data": FileName(),
            **_all(
                PUBLIC,
                "client_column label_column test_column task classes truth_column weight_column "
                "feature_columns drop_columns missing scaling bounds prepare scenario clients "
                "clusters samples "
                "labels_per_client alpha minority task_sizes overlap",
            ),
            "seed": OWNER,
        },
    ),
    "settings": _all(
        PUBLIC, "device threads dtype dropout target transcript engine workers keys_from_seed"
    ),
    # by it a guess of all data can be checked
    "data_digest": OWNER,
    "clients": UNCOVERED,
    "network": NETWORK,
}
COUNTS: Rule = _all(PUBLIC, "up down servers")
PRIVACY: Rule = {
    **_all(
        PUBLIC,
        "server_view lps_view authority_view client_view query_view unseen unprotected clear "
        "tuned_models reproducible_keys epsilon epsilon_rdp epsilon_replace delta accountant unit "
        "neighbouring placement clip noise free declared_public exact assumed not_covered "
        "uncovered_files",
    ),
    "masks": Each(_all(PUBLIC, "kind fresh is padding_bytes")),
    "over_rounds": _all(PUBLIC, "sentence rank solvable"),
    "together": _all(PUBLIC, "epsilon clients sentence"),
    "smallest_sums": _all(PUBLIC, "sentence members clients"),
    "fields": Each(
        _all(
            PUBLIC,
            "method field verb reader mechanism derived masked central summed paired encrypted",
        )
    ),
    "occupancy": Each(
        _all(
            PUBLIC, "method field sums coordinates of_one of_few blocks blocks_of_one least_members"
        )
    ),
    "releases": Each(_all(PUBLIC, "method field mechanism noise_multiplier times reader")),
    # clusters in which clients trained alone
    "unshared_models": _all(UNCOVERED, "labels file"),
}
SCORES: Rule = _all(
    UNCOVERED, "before after per_cluster baseline baseline_per_cluster below_baseline"
)
RESULT: Rule = {
    **_all(
        PUBLIC,
        "schema protocol scenario device version clients rounds metric unit target observer "
        "class_names feature_names seconds",
    ),
    "data": FileName(),
    "model": MODEL,
    "chosen": OPTIONS,
    "bytes": {**_all(PUBLIC, "up down servers"), "by_message": Each(COUNTS, named=True)},
    "privacy": PRIVACY,
    **_all(LABELS, "clusters labels"),
    **_all(
        UNCOVERED,
        "names truth leaves warning separation clear_clusters label_mass signature_kind "
        "signature_centre",
    ),
    "metrics": {
        **_all(UNCOVERED, "ari nmi purity exact at_target"),
        **_all(SCORES, "accuracy perplexity position_error"),
    },
    **dict.fromkeys(("dropped", "never_seen"), Each(UNCOVERED, named=True)),
    "refused": Each(Each(UNCOVERED, named=True), named=True),
    "fallback": {"nodes": UNCOVERED, "losses": Each(Each(UNCOVERED, named=True))},
    "stopped": _all(UNCOVERED, "round reason"),
    "theory": Each(
        _all(
            UNCOVERED,
            "sentence round members gamma noise allowed clusters guaranteed lambda within across "
            "aside",
        )
    ),
    "fields": OWNER,
    "power": {
        **_all(UNCOVERED, "summary clusters training sentences warning"),
        "releases": Each(
            _all(
                UNCOVERED,
                "method field kind use numbers rows noise_over_signal carried_up_to drowned_from "
                "verdict",
            )
        ),
        "remedies": Each(_all(UNCOVERED, "change use ratio verdict")),
    },
    "seed": OWNER,
}
RANGE: Rule = _all(PUBLIC, "low high")
OUTCOME: dict[str, Rule] = {
    **_all(PUBLIC, "verdict why claims held ledger_epsilon said seconds"),
    "score": (
        PUBLIC,  # null where there is none
        {
            **_all(PUBLIC, "metric value chance higher units interval_by"),
            "interval": (PUBLIC, RANGE),
            "chance_interval": RANGE,
        },
    ),
}
AUDIT: Rule = {
    **_all(
        PUBLIC,
        "schema numbered made version headline reading notes budget seconds summary numbered_name",
    ),
    "protections": OPTIONS,
    "attacks": Each(
        {
            **_all(PUBLIC, "attack source needs learns harm"),
            "run": {**OUTCOME, "without": Each({**OUTCOME, "protection": PUBLIC})},
            "unprotected": OUTCOME,
        }
    ),
    "adversary": UNCOVERED,
    "run": OWNER,  # digest with what stays
    "app": OWNER,  # of no run
}
DEEPEST = 8  # lists within each other
STAYS = object()


def leaving(value: Any, rule: Rule, whose: Collection[Whose]) -> Any:
    """Return what may leave of a JSON value.

    Args:
        value: as it was parsed.
        rule: of it.
        whose: entries that may leave.

    Returns:
        `STAYS` where nothing may.
    """
    if isinstance(rule, tuple):
        candidates = (leaving(value, option, whose) for option in rule)
        return next((retained for retained in candidates if retained is not STAYS), STAYS)
    if isinstance(rule, Whose):
        return value if rule in whose and _is_leaf(value) else STAYS
    if isinstance(rule, FileName):
        return value.rpartition("/")[2] if isinstance(value, str) else STAYS
    if not _may_leave(rule, whose):
        return STAYS
    if isinstance(rule, Each) and not rule.named:
        return _of_list(value, rule.rule, whose)
    return _of_object(value, rule, whose)


def _of_list(value: Any, rule: Rule, whose: Collection[Whose]) -> Any:
    """Return what may leave of a list; `STAYS` where an item is not what it should be.

    Args:
        value: as it was parsed.
        rule: of its items.
        whose: entries that may leave.
    """
    if not isinstance(value, list):
        return STAYS
    items = [leaving(item, rule, whose) for item in value]
    return items if all(item is not STAYS for item in items) else STAYS


def _of_object(value: Any, rule: Each | Mapping[str, Rule], whose: Collection[Whose]) -> Any:
    """Return what may leave of an object.

    Args:
        value: as it was parsed.
        rule: of all its entries, or of each by name.
        whose: entries that may leave.
    """
    if not isinstance(value, dict):
        return STAYS
    entries = {}
    for name, inner in value.items():
        inner_rule = rule.rule if isinstance(rule, Each) else rule.get(name, OWNER)
        released = leaving(inner, inner_rule, whose)
        if released is not STAYS:
            entries[name] = released
    return entries


def _is_leaf(value: Any, depth: int = DEEPEST) -> bool:
    """Return whether a JSON value has no entries of its own: a list may have plain values alone.

    Args:
        value: as it was parsed.
        depth: of lists within each other.
    """
    if isinstance(value, list):
        return depth > 0 and all(_is_leaf(item, depth - 1) for item in value)
    return not isinstance(value, dict) and not (isinstance(value, float) and math.isnan(value))


def _may_leave(rule: Rule, whose: Collection[Whose]) -> bool:
    """Return whether anything that has a rule may leave.

    Args:
        rule: of a value.
        whose: entries that may leave.
    """
    if isinstance(rule, Whose):
        return rule in whose
    if isinstance(rule, FileName):
        return True
    if isinstance(rule, Each):
        return _may_leave(rule.rule, whose)
    rules = rule if isinstance(rule, tuple) else rule.values()
    return any(_may_leave(inner, whose) for inner in rules)

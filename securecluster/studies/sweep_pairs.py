"""Paired differences of a sweep: variants at one level over the seeds that both have.

Runs of a seed share their clients, so that differences over seeds say more than two means do. The
test is Wilcoxon's signed-rank test, two-sided and exact for few seeds: of fewer than six none is
below 0.05, and of fewer than five there is none, as there is no interval. P-values of one score are
adjusted over all of its pairs and levels (Holm 1979).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import combinations, pairwise, product

import numpy as np
from scipy import stats

from securecluster.commands.failures import Row
from securecluster.studies.sweep_tables import (
    FEWEST,
    KEYS,
    groups,
    mean_interval,
    noisiness,
    without_nan,
)

NAME = "paired.csv"
LEVELS = ("noise", "target_epsilon")  # of a sweep


def paired(
    rows: Sequence[Row],
    metric: str,
    firsts: Collection[str] | None = None,
    by: Sequence[str] = LEVELS,
) -> list[Row]:
    """Return a line per score, level and pair of variants, with `first` minus `second`.

    Args:
        rows: as `sweep_tables.tidy` returns them, or as a DataFrame of them does.
        metric: the name of the clients' score.
        firsts: labels of variants that come before others; None for all pairs.
        by: columns whose values the runs of a pair share.

    Returns:
        Lines with the number of common `seeds`, the mean `difference` with its bootstrap interval
        (`low` and `high`), `p` of Wilcoxon's test and `p_holm`. All four are None with fewer than
        five seeds, and the last two 1 where no seed differs.
    """
    done = [row for row in without_nan(rows) if row["status"] == "done"]
    lines: list[Row] = []
    for score in ("ari", metric):
        of_score: list[Row] = []
        for level_rows in groups(done, by):
            of_score += _of_level(level_rows, score, firsts, by)
        _adjust(of_score)
        lines += of_score
    return lines


def _of_level(
    rows: Sequence[Row], score: str, firsts: Collection[str] | None, by: Sequence[str]
) -> list[Row]:
    """Return the lines of pairs of variants at one level.

    Args:
        rows: of finished runs at the level.
        score: "ari" or the metric.
        firsts: as `paired` has them.
        by: the columns that say which level.
    """
    scores: dict[str, dict[int, float]] = {}
    for row in rows:
        if row[score] is not None:
            scores.setdefault(row["variant"], {})[int(row["seed"])] = float(row[score])
    lines = []
    for first, second in combinations(sorted(scores, key=lambda v: v not in (firsts or ())), 2):
        if firsts is not None and first not in firsts:
            continue
        common = sorted(scores[first].keys() & scores[second].keys())
        differences = [scores[first][seed] - scores[second][seed] for seed in common]
        interval = mean_interval(differences)
        level = {name: rows[0][name] for name in by}
        if rows[0]["target_epsilon"] is not None:
            level["noise"] = None
        lines.append(
            {
                "score": score,
                **level,
                "first": first,
                "second": second,
                "seeds": len(common),
                "difference": interval.mean,
                "low": interval.low,
                "high": interval.high,
                "p": _p_value(differences),
            }
        )
    return lines


def losses_with_less_noise(rows: Sequence[Row], scores: Sequence[str] = ("ari",)) -> list[str]:
    """Return a sentence for each variant that is worse with less noise, where the seeds can tell.

    Args:
        rows: as `sweep_tables.tidy` returns them.
        scores: columns of which more is better.

    Returns:
        Of two neighbouring levels: those between which a mean falls although there is less noise,
        by more than the bootstrap interval of the paired differences; from five seeds on.
    """
    done = [row for row in without_nan(rows) if row["status"] == "done"]
    sentences = []
    for of_variant, score in product(groups(done, ("variant",)), scores):
        levels = sorted(groups(of_variant, KEYS), key=noisiness, reverse=True)
        for noisier, quieter in pairwise(levels):
            by_seed = {row["seed"]: row[score] for row in noisier if row[score] is not None}
            differences = [
                row[score] - by_seed[row["seed"]]
                for row in quieter
                if row[score] is not None and row["seed"] in by_seed
            ]
            mean, low, high = mean_interval(differences)
            if mean is None or low is None or high is None or high >= 0:
                continue
            name = "ARI" if score == "ari" else score
            sentences.append(
                f"{noisier[0]['variant']} is worse with less noise: from {_level(noisier)} to "
                f"{_level(quieter)} its {name} falls by {-mean:.2f} ({-high:.2f} to {-low:.2f})"
            )
    return sentences


def _level(rows: Sequence[Row]) -> str:
    """Return in words at which level runs were."""
    target = rows[0]["target_epsilon"]
    return f"noise {rows[0]['noise']:g}" if target is None else f"ε {target:g}"


def _p_value(differences: Sequence[float]) -> float | None:
    """Return the p-value of Wilcoxon's signed-rank test; None with too few seeds for it."""
    if len(differences) < FEWEST:
        return None
    if not np.any(differences):
        return 1.0
    return float(stats.wilcoxon(differences).pvalue)


def _adjust(lines: Sequence[Row]) -> None:
    """Set `p_holm`: sorted p-values times the number of those not below them, never falling."""
    tested = sorted((line for line in lines if line["p"] is not None), key=lambda line: line["p"])
    largest = 0.0
    for position, line in enumerate(tested):
        largest = max(largest, min(1.0, line["p"] * (len(tested) - position)))
        line["p_holm"] = largest
    for line in lines:
        line.setdefault("p_holm", None)

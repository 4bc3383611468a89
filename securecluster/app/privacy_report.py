"""The privacy section of a finished run, in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from securecluster.privacy.dp.ledger import COSTLESS
from securecluster.runs.contents import Mask, PricedRelease, Privacy, UnsharedModels
from securecluster.runs.number_format import enumerated, times


def show(console: Any, privacy: Privacy) -> None:
    """Print the privacy section as a table.

    Args:
        console: rich's.
        privacy: `privacy` of result.json.
    """
    from rich.table import Table

    table = Table(title="what the server saw, and what it did not", show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")

    def add_rows(heading: str, texts: Iterable[str]) -> None:
        for text in texts:
            table.add_row(heading, text)

    add_rows("saw", privacy["server_view"])
    if "authority_view" in privacy:
        add_rows("key authority", privacy["authority_view"])
    add_rows("a local parameter server saw", privacy.get("lps_view", ()))
    add_rows("clients saw", clients_saw(privacy))
    add_rows("did not see", privacy.get("unseen", ()))
    if "over_rounds" in privacy:
        table.add_row("sums over rounds", privacy["over_rounds"]["sentence"])
    add_rows("unprotected", privacy.get("unprotected", ()))
    if "unshared_models" in privacy:
        table.add_row("no shared model", _unshared(privacy["unshared_models"]))
    add_rows("padding", _paddings(privacy["masks"]))
    if _noised(privacy):
        table.add_row("noise", _priced_releases(privacy["releases"]))
    add_rows("free", privacy.get("free", ()))
    add_rows("declared public", privacy.get("declared_public", ()))
    table.add_row("ε", _epsilon(privacy))
    add_rows("assumed", privacy.get("assumed", ()))
    add_rows("not covered", privacy["not_covered"])
    add_rows("not covered", privacy.get("uncovered_files", ()))
    console.print(table)


def clients_saw(privacy: Privacy) -> list[str]:
    """Return what queries brought to clients, and what else they saw of other clients.

    Args:
        privacy: `privacy` of result.json; older runs have no list of what queries brought.
    """
    return [*privacy.get("query_view", ()), *privacy.get("client_view", ())]


def _paddings(masks: Sequence[Mask]) -> list[str]:
    """Return a sentence for each mask that makes updates longer."""
    sentences = []
    for mask in masks:
        padding = mask["padding_bytes"]
        if padding:
            sentences.append(
                f"the {mask['kind']} adds {padding:,} bytes to every update and every average"
            )
    return sentences


def _epsilon(privacy: Privacy) -> str:
    """Return ε in words, with everything that it has no meaning without.

    Args:
        privacy: `privacy` of result.json.
    """
    meaning = f"({privacy['placement']}; {privacy['neighbouring']})"
    epsilon = privacy["epsilon"]
    if epsilon is None:
        if not _noised(privacy):
            return f"infinite {meaning}"
        exact = ", ".join(privacy["exact"])
        return f"infinite {meaning}: without noise went {exact}"
    if not privacy.get("delta"):
        return f"0 {meaning}"
    bounds = f"{privacy['accountant']}; Rényi bound {privacy['epsilon_rdp']:.4g}"
    replaced = privacy["epsilon_replace"]
    if replaced is not None:
        bounds += f"; replacing instead {replaced:.4g}"
    delta = f"{privacy['delta']:g}"
    return f"{epsilon:.4g} at δ = {delta} {meaning}; {bounds}"


def _noised(privacy: Privacy) -> bool:
    return any(row["noise_multiplier"] for row in privacy.get("releases", ()))


def _priced_releases(rows: Iterable[PricedRelease]) -> str:
    """Return the releases that ε is made of, in words.

    Args:
        rows: `releases` of the privacy section.
    """
    texts = [_release_text(row) for row in rows if row["mechanism"] not in COSTLESS]
    return "; ".join(texts)


def _release_text(row: PricedRelease) -> str:
    field = row["field"] or "training"  # the noise of DP-SGD is in no field of a reply
    count = times(row["times"])
    name = f"{field} of {row['method']}, {count}"
    multiplier = row["noise_multiplier"]
    if not multiplier:
        return f"{name}, exact"
    return f"{name}, z = {multiplier:.4g}"


def _unshared(models: UnsharedModels) -> str:
    """Return which clusters have no shared model, and where their clients' own models are.

    Args:
        models: `unshared_models` of the privacy section.
    """
    clusters = enumerated("cluster", models["labels"])
    return (
        f"{clusters}: all that their clients hold was trained alone, without noise; it is in "
        f"{models['file']}, for its owner alone, and epsilon does not cover it"
    )

"""The privacy section of a finished run, in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from securecluster.core.number_format import enumerated, times
from securecluster.folders.schemas import Mask, PricedRelease, Privacy, UnsharedModels
from securecluster.privacy.dp.ledger import COSTLESS
from securecluster.reports import terminal
from securecluster.statements import odds


class Statements(NamedTuple):
    """Sentences of a report that belong together.

    Attributes:
        label: beside each of them in a terminal.
        heading: above them on a page; empty where pages do not have them.
        texts: the sentences.
    """

    label: str
    heading: str
    texts: Sequence[str]


def views(privacy: Privacy) -> list[Statements]:
    """Return what each party saw, and what the server did not see.

    Args:
        privacy: `privacy` of result.json; runs of older versions have fewer entries.
    """
    clients_saw = [*privacy.get("query_view", ()), *privacy.get("client_view", ())]
    over_rounds = []
    if "over_rounds" in privacy:
        over_rounds.append(privacy["over_rounds"]["sentence"])
    smallest = []
    if "smallest_sums" in privacy:
        smallest.append(privacy["smallest_sums"]["sentence"])
    lps_view = privacy.get("lps_view", ())
    return [
        Statements("saw", "The server saw", privacy["server_view"]),
        Statements("key authority", "The key authority saw", privacy.get("authority_view", ())),
        Statements("a local parameter server saw", "A local parameter server saw", lps_view),
        Statements("clients saw", "Clients saw", clients_saw),
        Statements("did not see", "The server did not see", privacy.get("unseen", ())),
        Statements("sums over rounds", "Sums over rounds", over_rounds),
        Statements("smallest sums", "The smallest sums", smallest),
        Statements("unprotected", "Unprotected", privacy.get("unprotected", ())),
    ]


def guarantee(privacy: Privacy) -> list[Statements]:
    """Return what ε is, assumes and leaves out.

    Args:
        privacy: `privacy` of result.json; runs of older versions have fewer entries.
    """
    unshared = []
    if "unshared_models" in privacy:
        unshared.append(_unshared(privacy["unshared_models"]))
    tuned = []
    if "tuned_models" in privacy:
        tuned.append(privacy["tuned_models"])
    together = [privacy["together"]["sentence"]] if "together" in privacy else []
    noise = []
    if _noised(privacy):
        noise.append(_priced_releases(privacy["releases"]))
    uncovered_files = privacy.get("uncovered_files", ())
    return [
        Statements("no shared model", "", unshared),
        Statements("tuned models", "", tuned),
        Statements("padding", "", _paddings(privacy["masks"])),
        Statements("noise", "", noise),
        Statements("no cost", "ε does not grow by", privacy.get("free", ())),
        Statements("declared public", "Declared public", privacy.get("declared_public", ())),
        Statements("ε", "In full", [_epsilon(privacy)]),
        Statements("with the earlier run", "With the run it started from", together),
        Statements("odds", "", odds.in_words(privacy)[:1]),
        Statements("assumed", "It assumes", privacy.get("assumed", ())),
        Statements("not covered", "It does not cover", privacy["not_covered"]),
        Statements("not covered", "Files that it does not cover", uncovered_files),
    ]


def show(console: Any, privacy: Privacy) -> None:
    """Print the privacy section as a table.

    Args:
        console: rich's.
        privacy: `privacy` of result.json.
    """
    rows = []
    for statements in [*views(privacy), *guarantee(privacy)]:
        rows += [(statements.label, text) for text in statements.texts]
    table = terminal.table(("", ""), rows, "what the server saw, and what it did not")
    table.show_header = False
    console.print(table)


def price_of_noise(privacy: Privacy) -> str | None:
    """Return ε in words, for those who print nothing else; None of a run without noise.

    Args:
        privacy: `privacy` of result.json.
    """
    if not _noised(privacy):
        return None
    together = privacy["together"]["sentence"] if "together" in privacy else ""
    return "; ".join(filter(None, (f"ε: {_epsilon(privacy)}", together)))


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
        bounds += f"; {replaced:.4g} against any other data in their place"
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

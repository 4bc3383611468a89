"""What a finished run says of privacy: what each party saw, ε of everything released, and what that
does not cover.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from securecluster.app.disclosures import CLIENT, disclosures, free, uncovered, unprotected, unseen
from securecluster.privacy.dp.ledger import Row
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.serialization import CLIENTS

KEYS = (
    "keys of the key agreement are signed only where nodes have a roster: without one, or with "
    "identities that follow from a seed that the"
    " server knows, as in a simulation, it can name itself a peer and read the mask seed, or play "
    "leader and set it"
)
NETWORK = "timing, message sizes, who takes part and who drops out are visible to the network"
OBSERVED = "the observer's metrics and agreement lie outside the protocol and outside epsilon"
EXACT = (
    "what leaves without noise is not differentially private: epsilon is infinite (null) as soon "
    "as anything does"
)
SUMS = (
    "the sums of clipped gradients that DP-SGD adds noise to are rounded as they are made: beyond "
    "some ten thousand samples in"
    " a batch that may exceed what the clip leaves for it (benchmarks.grid_noise)"
)
NOISED = [
    "choosing the clip, the noise, the number of rounds or any other option by private data is a "
    "release of its own",
    "epsilon is of this run, and newcomers add to it: other runs on the same clients cost more "
    "together (Ledger.union)",
    "a server that asks for more than its protocol does spends more than this: clients keep no "
    "budget of their own",
    "keys of noise follow from the run's seed in a simulation: whoever knows it takes the noise "
    "off",
    "noise comes from a cipher's stream: epsilon holds against readers with bounded computing "
    "power, who cannot tell it from random",
]
ASSUMED = {
    "client": "a client's contribution to each release is one clipped row; that it is absent "
    "counts as a row of zeros",
    "example": "how many samples each client has is public: one that is absent leaves its place, "
    "without gradient, loss or features; which"
    " are in a batch is drawn for each alone and nobody else knows; no sample, and no person's "
    "data, are at two clients, so clients compose"
    " in parallel, and epsilon is the largest of theirs",
}
ASKED = "who is asked in which round is visible, so no amplification by sampling clients is claimed"
PLACED = {
    "local": "local: each client adds the noise itself, so the server, too, is held off",
    "central": "central: a trusted server adds the noise to what it uses; it reads clipped updates "
    "without it, and a full transcript holds"
    " them so; losses, layers and Gram matrices have their clients' own noise",
}
NEIGHBOURS = {
    "client": "add or remove one client",
    "example": "add or remove one example of one client",
}


def section(fitted: ClusteringProtocol) -> dict[str, Any]:
    """`privacy` in result.json."""
    ledger, info, config = fitted.ledger_, fitted.mask_info(), fitted.kept_.learned.config
    unit = str(config["dp_unit"])
    price, rows = ledger.price(config["delta"]), ledger.summary()
    finite = not math.isinf(price.epsilon)
    replaced = ledger.price(config["delta"], "replace") if finite and ledger.events else None
    noised = any(row.noise_multiplier for row in rows)
    found = disclosures(fitted)
    sees = {
        reader: [own.sentence(info.shows) for own in found if own.reader == reader]
        for reader in ("server", "lps", CLIENT)
    }
    for_lps, for_clients = sees["lps"] + fitted.lps_view(), sees[CLIENT] + fitted.client_view()
    unshared = {"labels": fitted.unshared_labels_, "file": CLIENTS}
    return {
        "masks": _masks(fitted.mask, info.padding_bytes),
        "sees": sees["server"] + fitted.server_view(),
        **({"lps_sees": for_lps} if for_lps else {}),
        **({"client_sees": for_clients} if for_clients else {}),
        "unseen": unseen(fitted, found),
        "unprotected": unprotected(found),
        "fields": [asdict(own) for own in found],
        **({"unshared_models": unshared} if fitted.unshared_labels_ else {}),
        **({"clear": True} if fitted.client.clear else {}),
        "reproducible_keys": True,
        "epsilon": price.epsilon if finite else None,
        "epsilon_rdp": price.rdp if finite else None,
        "epsilon_replace": None
        if replaced is None or math.isinf(replaced.epsilon)
        else replaced.epsilon,
        "delta": config["delta"] if finite and rows else 0.0 if finite else None,
        "accountant": price.accountant,
        "unit": unit,
        "neighbouring": NEIGHBOURS[unit],
        "placement": "nothing is released"
        if not rows
        else PLACED[config["placement"]]
        if noised
        else "no noise",
        "clip": config["clip"],
        "noise": config["noise"],
        "releases": [_told(row) for row in rows],
        "free": free(found, rows),
        "exact": [f"{method}: {name}" for method, name in ledger.exact()],
        "assumed": [ASSUMED[unit], ASKED, *_public(config)] if noised else [],
        "not_covered": _not_covered(
            fitted, info.not_covered, bool(ledger.exact()) or not rows, noised
        ),
        "uncovered_files": uncovered(fitted) if finite or noised else [OBSERVED],
    }


def _not_covered(fitted: ClusteringProtocol, mask: str, exact: bool, noised: bool) -> list[str]:
    own = [mask] if mask else []
    config = fitted.kept_.learned.config
    windows = _windows(config) if noised else []
    sums = [SUMS] if any(event.mechanism == "dp-sgd" for event in fitted.ledger_.events) else []
    keys = [KEYS] if fitted.with_fitted_params().pipeline(config).keyed else []
    return (
        own
        + fitted.not_covered()
        + [EXACT] * exact
        + NOISED * noised
        + sums
        + windows
        + keys
        + [NETWORK]
    )


def _public(config: dict[str, Any]) -> list[str]:
    """Return what of the configuration may come from clients' data, and is taken as public."""
    kind, classes = config["objective"]["kind"], config["classes"]
    if kind == "classification":
        return [
            f"the number of classes ({classes}) is public: where it was not given it is 1 + the "
            "largest label of any client"
        ]
    if kind == "language":
        return [
            f"the vocabulary ({classes} tokens) is public, also where it was counted on all "
            "training texts, as that of ag_news was"
        ]
    return []


def _windows(config: dict[str, Any]) -> list[str]:
    """Return what an example is, where examples have positions or tokens in common."""
    kind, places = config["objective"]["kind"], config["shape"][0]
    if config["dp_unit"] != "example":
        return []
    if kind == "trajectory":
        count = places + 1
        return [
            f"an example is a window of {count} positions: one position may be in {count} "
            "examples, and costs as much as all of them"
        ]
    if kind == "language":
        return [
            f"an example is a window of {places} tokens and the tokens that follow, and no "
            "article, speech or person: neighbouring windows"
            " share a token, and a text costs as much as all of its windows"
        ]
    return []


def _told(row: Row) -> dict[str, Any]:
    return {
        "method": row.method,
        "field": row.field,
        "mechanism": row.mechanism,
        "noise_multiplier": row.noise_multiplier,
        "times": row.count,
        "reader": row.reader,
    }


def _masks(name: str, padding_bytes: int) -> list[dict[str, Any]]:
    """`padding_bytes`: what the mask adds to every update and every average."""
    return (
        []
        if name == "none"
        else [
            {
                "kind": name,
                "fresh": "each call",
                "is": "obfuscation",
                "padding_bytes": padding_bytes,
            }
        ]
    )


def show(console: Any, privacy: dict[str, Any]) -> None:
    """Print it as a table."""
    from rich.table import Table

    table = Table(title="what the server saw, and what it did not", show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for text in privacy["sees"]:
        table.add_row("saw", text)
    for text in privacy.get("lps_sees", ()):
        table.add_row("a local parameter server saw", text)
    for text in privacy.get("client_sees", ()):
        table.add_row("a client saw", text)
    for text in privacy.get("unseen", ()):
        table.add_row("did not see", text)
    for text in privacy.get("unprotected", ()):
        table.add_row("unprotected", text)
    if "unshared_models" in privacy:
        table.add_row("no shared model", _unshared(privacy["unshared_models"]))
    for mask in privacy["masks"]:
        if mask.get("padding_bytes"):
            table.add_row(
                "padding",
                f"the {mask['kind']} adds {mask['padding_bytes']:,} bytes to every update and "
                "every average",
            )
    if _noised(privacy):
        table.add_row(
            "noise",
            "; ".join(_release(row) for row in privacy["releases"] if row["mechanism"] != "free"),
        )
    for text in privacy.get("free", ()):
        table.add_row("free", text)
    table.add_row("ε", _epsilon(privacy))
    for text in privacy.get("assumed", ()):
        table.add_row("assumed", text)
    for text in [*privacy["not_covered"], *privacy.get("uncovered_files", ())]:
        table.add_row("not covered", text)
    console.print(table)


def _epsilon(privacy: dict[str, Any]) -> str:
    """ε, and all that it means nothing without."""
    about = f"({privacy['placement']}; {privacy['neighbouring']})"
    if privacy["epsilon"] is None:
        told = f": without noise went {', '.join(privacy['exact'])}" if _noised(privacy) else ""
        return f"infinite {about}{told}"
    if not privacy.get("delta"):
        return f"0 {about}"
    beside = [f"{privacy['accountant']}; Rényi bound {privacy['epsilon_rdp']:.4g}"]
    if privacy["epsilon_replace"] is not None:
        beside.append(f"replacing instead {privacy['epsilon_replace']:.4g}")
    return f"{privacy['epsilon']:.4g} at δ = {privacy['delta']:g} {about}; {'; '.join(beside)}"


def _noised(privacy: dict[str, Any]) -> bool:
    return any(row["noise_multiplier"] for row in privacy.get("releases", ()))


def _release(row: dict[str, Any]) -> str:
    times = "once" if row["times"] == 1 else f"{row['times']} times"
    name = f"{row['field'] or 'training'} of {row['method']}, {times}"
    return (
        f"{name}, z = {row['noise_multiplier']:.4g}"
        if row["noise_multiplier"]
        else f"{name}, exact"
    )


def _unshared(found: dict[str, Any]) -> str:
    """Say which clusters have no shared model, and where their clients' own models are."""
    labels = found["labels"]
    few = ", ".join(map(str, labels[:20])) + (f" … ({len(labels)})" if len(labels) > 20 else "")
    word = "cluster" if len(labels) == 1 else "clusters"
    return (
        f"{word} {few}: all that their clients hold was trained alone, without noise; it is in "
        f"{found['file']}, for its owner alone,"
        " and epsilon does not cover it"
    )

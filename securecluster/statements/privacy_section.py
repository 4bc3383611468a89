"""The privacy section of result.json.

It says what each party saw, the ε of everything released, and what that ε does not cover.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from securecluster.data.scaling import SHARED, Scaling
from securecluster.parties.derived import needs_samples
from securecluster.privacy import run_secret
from securecluster.privacy.dp.ledger import Price, Row
from securecluster.protections.registry import sum_plan_of
from securecluster.results.saving import CLIENTS
from securecluster.statements.disclosures import (
    CLIENT,
    Disclosure,
    authority_view,
    disclosures,
    free,
    over_rounds,
    uncovered,
    unprotected,
    unseen,
)
from securecluster.statements.query_view import occupied, of_one_client, query_view
from securecluster.statements.smallest_sums import smallest_sums

if TYPE_CHECKING:
    from securecluster.results.fitted import FittedRun

# sentences of `not_covered` and `assumed`, which state the limits of the guarantee
KEYS = (
    "keys of the key agreement are signed only where nodes have a roster: without one, or with "
    "identities that the server has, it can pose as a peer and read the mask seed, or pose as the "
    "leader and choose it"
)
PADS = (
    "pads hide rows of pairs from a server that has no client on its side: with one, or where keys "
    "are not signed and it poses as one, it reads the numbers that others have of that client, and "
    "it can ask about data or models that it made up itself"
)
NETWORK = "timing, message sizes, who takes part and who drops out are visible to the network"
OBSERVED = "the observer's metrics and agreement lie outside the protocol and outside epsilon"
EXACT = (
    "releases without noise are not differentially private: epsilon is infinite (null) as soon as "
    "there is one"
)
SUMS = (
    "the sums of clipped gradients that DP-SGD adds noise to are rounded as they are computed: "
    "beyond some ten thousand samples in a batch the rounding may exceed the margin that the clip "
    "leaves for it (benchmarks.costs.grid_noise)"
)
# of clients that train by functions of the user's
FUNCTIONS = (
    "clients train by the user's own functions (ForeignModel): epsilon takes them to read nothing "
    "but a client's own samples and the arrays that they get, and never to fail because of these; "
    "what else they do (files, messages, state between two trainings) is in no transcript"
)
STATED = (
    "for one sample of a client the user states epsilon {epsilon:g} at delta {delta:g} over the "
    "run, by an accountant of their own: nothing here has checked it, and no other epsilon of this "
    "report contains it"
)
# of noise in shares
SHARES = (
    "noise that clients add in shares is enough where the survivors of a sum do not collude with "
    "the server, which knows the shares of those that do, and where it names the same survivors to "
    "all of them: else it may read a sum over fewer"
)
STOPPED = (
    "a callback that saw the observer's scores stopped the run: when it did is in no epsilon, "
    "which counts what was released as if this number of rounds had been chosen beforehand"
)
NOISED = [
    "choosing the clip, the noise, the number of rounds or any other option by private data is a "
    "release of its own",
    "epsilon is of this run, and newcomers add to it: other runs on the same clients cost more "
    "together (Ledger.union)",
    "a server that asks for more than its protocol does spends more than this: {budgets}",
    "{keys}",
    "noise comes from a cipher's stream: epsilon holds against readers with bounded computing "
    "power, who cannot distinguish it from random numbers",
]
# what some of these say of clients in one process, and of nodes elsewhere
IN_SIMULATION = {
    "budgets": "simulated clients keep no budget of their own, as nodes may (Budget)",
    "keys": "in a simulation keys of noise follow from one secret of the run: whoever has it can "
    "remove the noise",
}
OF_NODES = {
    "budgets": "each node has a ledger of its own, and the budget that its owner sets",
    "keys": "nodes draw their noise by keys of their own, which they must keep",
}
# by the unit of privacy
ASSUMED = {
    "client": "a client's contribution to each release is one clipped row, and a row of zeros "
    "where its data are blank; who takes part, which a client that is really added or removed "
    "changes, is public",
    "example": "each client's number of samples n is public: a blank sample keeps its position, "
    "without gradient, loss or features; one that is really added or removed changes n, by which "
    "means are divided and from which noise and numbers of steps follow, and epsilon does not "
    "cover that; which samples are trained on is public: where the others were held out "
    "stratified by label, it follows from labels, which epsilon does not cover "
    "(Split(stratify=False)); whether a sample is in a batch is drawn independently of "
    "the others and known to its client alone; no sample, and no person's data, are at two "
    "clients, so clients compose in parallel, and epsilon is the largest of theirs",
}
ASKED = "who is asked in which round is visible, so no amplification by sampling clients is claimed"
# who adds the noise, by the option `placement`
PLACED = {
    "distributed": "each client adds a share of the noise, as whole numbers in secure sums: the "
    "server sees noised sums only, and no single reply is private by itself; the shares of the "
    "fewest survivors of which a sum is unmasked amount to the noise, if all of them are honest",
    "local": "local: each client adds the noise itself, so it protects from the server, too",
    "central": "central: a trusted server adds the noise to what it uses; it reads clipped updates "
    "without noise, and a full transcript contains them like this; losses, choices, layers, "
    "signatures and Gram matrices have noise of their clients",
}
# The relation under which ε bounds how much one client, or one example, can change any release: it
# keeps its place and contributes zeros ("zero-out", Kairouz et al. 2021). What it does not change
# is public.
NEIGHBOURS = {
    "client": "for one client's data, or blanks in their place; who takes part is public",
    "example": "for one example of one client, or a blank in its place; numbers of examples are "
    "public",
}
Section = dict[str, Any]  # `privacy` of result.json
Config = dict[str, Any]  # the configuration that clients and server agree on


def section(fitted: FittedRun) -> Section:
    """Return `privacy` of result.json.

    Args:
        fitted: the result of the run.
    """
    config = fitted.kept_.learned.config
    ledger = fitted.ledger_
    rows = ledger.summary()
    disclosed = disclosures(fitted)
    noised = _any_noise(rows)
    price = ledger.price(config["delta"])
    assumed: list[str] = []
    if noised:
        assumed = [ASSUMED[config["dp_unit"]], ASKED, *_public(config)]
    # where ε is infinite without noise, there is no guarantee that a file could fall outside of
    uncovered_files = [OBSERVED]
    if noised or not math.isinf(price.epsilon):
        uncovered_files = uncovered(fitted)
    return {
        **_views(fitted, disclosed),
        **_over_rounds(fitted),
        "reproducible_keys": fitted.kept_.learned.settings.keys_from_seed,
        **_guarantee(fitted, price, rows),
        **_together(fitted),
        "releases": [_release_entry(row) for row in rows],
        "free": free(disclosed, rows),
        **_declared_public(fitted),
        "exact": [f"{method}: {name}" for method, name in ledger.exact()],
        "assumed": assumed,
        "not_covered": _not_covered(fitted, rows),
        "uncovered_files": uncovered_files,
    }


def _declared_public(fitted: FittedRun) -> Section:
    """Return what is in no ε because its protocol declares it public; nothing in most runs."""
    declared = fitted.ledger_.declared_public()
    if not declared:
        return {}
    return {
        "declared_public": [
            f"{name} of {method}: its protocol says that it is of nobody's data, which nothing "
            "checks, so it is in no epsilon"
            for method, name in declared
        ]
    }


def _any_noise(rows: Sequence[Row]) -> bool:
    """Return whether any release of a ledger's summary has noise."""
    return any(row.noise_multiplier for row in rows)


def _views(fitted: FittedRun, disclosed: Sequence[Disclosure]) -> Section:
    """Return what each party saw, and what the server did not see.

    An entry that only some protocols have is left out where it would be empty.

    Args:
        fitted: the result of the run.
        disclosed: all disclosures of the run.
    """
    info = fitted.mask_info()
    declared = fitted.method.disclosures().of_run(fitted.method)

    def sentences(reader: str) -> list[str]:
        return [field.sentence(info.shows) for field in disclosed if field.reader == reader]

    views: Section = {
        "masks": _masks(fitted.method.mask, info.padding_bytes),
        "server_view": [*sentences("server"), *declared.server],
    }
    if needs_samples(fitted.method):
        views["server_view"].append(
            "each client's number of samples, which it tells before the run: the configuration "
            "follows from it"
        )
    of_some_runs = {
        "lps_view": [*sentences("lps"), *declared.lps],
        "authority_view": authority_view(fitted, disclosed),
        "client_view": [*sentences(CLIENT), *declared.clients],
        "query_view": query_view(fitted),
    }
    views.update({name: view for name, view in of_some_runs.items() if view})
    views["unseen"] = unseen(fitted, disclosed)
    views["unprotected"] = [*unprotected(disclosed), *of_one_client(fitted, disclosed)]
    views["fields"] = [field.as_json() for field in disclosed]
    counted = occupied(fitted, disclosed)
    if counted:
        views["occupancy"] = [asdict(figures) for figures in counted]
    if fitted.unshared_labels_:
        views["unshared_models"] = {"labels": fitted.unshared_labels_, "file": CLIENTS}
    alone = _done_alone(fitted)
    if alone:
        views["tuned_models"] = (
            f"each client {' and '.join(alone)}: it is kept at the client, no party is told of it, "
            "and epsilon does not cover it"
        )
    if fitted.method.client.clear:
        views["clear"] = True
    return views


def _done_alone(fitted: FittedRun) -> list[str]:
    """Return in words what each client does by itself for the model that it ends with."""
    alone = []
    if fitted.method.training.local_layers:
        alone.append("trained layers that stay with it")
    if fitted.method.training.keep_best:
        alone.append("chose the best of its models by samples that it kept out of training")
    rounds = fitted.method.training.tuning(fitted.method)
    if rounds:
        alone.append(f"tuned its model alone after the run ({rounds} rounds, without noise)")
    return alone


def _over_rounds(fitted: FittedRun) -> Section:
    """Return what secure sums tell over all rounds, and the smallest; nothing of plain sums."""
    if not fitted.method.sums.hide_replies:
        return {}
    learned = fitted.kept_.learned
    smallest = smallest_sums(learned.network.smallest_sums, int(learned.config["clients"]))
    if smallest["members"]:
        planned = sum_plan_of(learned.config).sentence(smallest["members"])
        smallest["sentence"] += f"; {planned}" if planned else ""
    return {"over_rounds": over_rounds(fitted), "smallest_sums": smallest}


def _guarantee(fitted: FittedRun, price: Price, rows: Sequence[Row]) -> Section:
    """Return ε with everything that it has no meaning without; null stands for infinite.

    Args:
        fitted: the result of the run.
        price: ε of all releases at the configured δ.
        rows: the ledger's summary.
    """
    config = fitted.kept_.learned.config
    unit = str(config["dp_unit"])
    # JSON has no infinity
    epsilon = None
    epsilon_rdp = None
    delta = None
    if not math.isinf(price.epsilon):
        epsilon = price.epsilon
        epsilon_rdp = price.rdp
        delta = 0.0
        if rows:
            delta = config["delta"]
    return {
        "epsilon": epsilon,
        "epsilon_rdp": epsilon_rdp,
        "epsilon_replace": _epsilon_replace(fitted, price),
        "delta": delta,
        "accountant": price.accountant,
        "unit": unit,
        "neighbouring": NEIGHBOURS[unit],
        "placement": _placement(config, rows),
        "clip": config["clip"],
        "noise": config["noise"],
    }


def _together(fitted: FittedRun) -> Section:
    """Return what a run costs with that which it started from; nothing of one that began anew.

    Args:
        fitted: the result of the run.
    """
    start = fitted.earlier
    if start is None:
        return {}
    delta = fitted.kept_.learned.config["delta"]
    price, both = start.together(fitted.ledger_, delta)
    is_finite = not math.isinf(price.epsilon)
    epsilon = f"ε = {price.epsilon:.4g} at δ = {delta:g}" if is_finite else "ε = ∞"
    others = len({*fitted.ledger_.names.values()}) - both
    sentence = (
        f"clients started from models of an earlier run ({start.protocol}), and both runs together "
        f"cost {epsilon}: {both} of the clients were in both, by their names"
    )
    if others:
        sentence += f", and {others} are taken for other persons than those of the earlier run"
    if start.mask != "none":
        sentence += (
            f"; its mask ({start.mask}) hid these models from the server, which has them now"
        )
    return {
        "together": {
            "epsilon": price.epsilon if is_finite else None,
            "clients": both,
            "sentence": sentence,
        }
    }


def _epsilon_replace(fitted: FittedRun, price: Price) -> float | None:
    """Return ε where one unit is replaced by any other one; None where it is infinite.

    Args:
        fitted: the result of the run.
        price: ε of all releases where one unit is blanked.
    """
    ledger = fitted.ledger_
    if math.isinf(price.epsilon) or not ledger.events:
        return None
    replaced = ledger.price(fitted.kept_.learned.config["delta"], "replace")
    return replaced.epsilon


def _placement(config: Config, rows: Sequence[Row]) -> str:
    """Return in words who adds the noise.

    Args:
        config: of the run.
        rows: the ledger's summary.
    """
    if not rows:
        return "nothing is released"
    if not _any_noise(rows):
        return "no noise"
    return PLACED[config["placement"]]


def _not_covered(fitted: FittedRun, rows: Sequence[Row]) -> list[str]:
    """Return what the guarantee leaves out, from the mask's own limits to the network's view.

    Args:
        fitted: the result of the run.
        rows: the ledger's summary.
    """
    limits = []
    mask_limits = fitted.mask_info().not_covered
    if mask_limits:
        limits.append(mask_limits)
    limits += fitted.method.disclosures().not_covered
    limits += _not_covered_by_noise(fitted, rows)
    limits += _of_functions(fitted.method.model)
    return [*limits, *_limits_of_keys(fitted), NETWORK]


def _of_functions(model: Any) -> list[str]:
    """Return what the guarantee leaves out where clients train by functions of the user's.

    Args:
        model: of the protocol: a name, or an object of the user's.
    """
    if isinstance(model, str):
        return []
    from securecluster.models.foreign import ForeignModel

    if not isinstance(model, ForeignModel):
        return []
    if model.example_privacy is None:
        return [FUNCTIONS]
    epsilon, delta = model.example_privacy
    return [FUNCTIONS, STATED.format(epsilon=epsilon, delta=delta)]


def _limits_of_keys(fitted: FittedRun) -> list[str]:
    """Return what the guarantee leaves out where keys are weak, or clients agree on them."""
    protocol = fitted.method
    limits = []
    if fitted.kept_.learned.settings.keys_from_seed:
        limits.append(run_secret.FROM_SEED)
    # of masks and seals
    if protocol.pipeline(fitted.kept_.learned.config).keyed:
        limits.append(KEYS)
    if protocol.pairs.hide_rows and not protocol.pairs.by_authority:
        limits.append(PADS)
    return limits


def _not_covered_by_noise(fitted: FittedRun, rows: Sequence[Row]) -> list[str]:
    """Return what ε leaves out.

    Args:
        fitted: the result of the run.
        rows: the ledger's summary.
    """
    ledger = fitted.ledger_
    noised = _any_noise(rows)
    limits = []
    if ledger.exact() or not rows:
        limits.append(EXACT)
    if noised:
        words = OF_NODES if fitted.kept_.of_server else IN_SIMULATION
        limits += [sentence.format(**words) for sentence in NOISED]
    if noised and fitted.kept_.learned.stopped is not None:
        limits.append(STOPPED)
    mechanisms = {event.mechanism for event in ledger.events}
    if "skellam" in mechanisms:
        limits.append(SHARES)
    if "dp-sgd" in mechanisms:
        limits.append(SUMS)
    if noised:
        limits += _windows(fitted.kept_.learned.config)
    return limits


def _public(config: Config) -> list[str]:
    """Return what the guarantee takes as public, and which statistics of rows are within it.

    Args:
        config: of the run.
    """
    objective = config["objective"]["kind"]
    classes = config["classes"]
    public = []
    if objective == "classification":
        public.append(f"the {classes} classes are public, as the user or the data set names them")
    if objective == "binary":
        public.append("the two classes are public, as the user names them")
    if objective in ("multilabel", "regression"):
        outputs = f"{classes} target{'s' * (classes > 1)}"
        public.append(f"the task {objective}, of {outputs}, is public")
    if config["objective"].get("bounds"):
        public.append(
            "bounds of the targets are public, and targets beyond them are cut off before training"
        )
    if config["objective"].get("standardised"):
        public.append(
            "each client scales its targets by their own mean and deviation, which changes its "
            "contributions alone, and epsilon covers these as a whole"
        )
    if objective == "language":
        public.append(
            f"the vocabulary ({classes} tokens) is public; that of ag_news was counted on all of "
            "its training articles, which no epsilon covers"
        )
    return [*public, *_public_scales(config)]


def _public_scales(config: Config) -> list[str]:
    """Return what samples are scaled by, and which of it the guarantee takes as public.

    Args:
        config: of the run.
    """
    public = []
    scaling = Scaling.read(config.get("scaling"))
    if scaling is not None and scaling.of_rows:
        public.append(
            "each client scales its samples by their own mean and deviation, which changes its "
            "contributions alone, and epsilon covers these as a whole"
        )
    if scaling is not None and scaling.shared:
        found = "means and deviations" if scaling.kind == SHARED else "medians and quartiles"
        public.append(
            "the bounds of the features are public, and known without the data; samples are "
            f"scaled by {found} over all clients, which follow from one noised sum "
            "(column_sums) that epsilon includes"
        )
    return public


def _windows(config: Config) -> list[str]:
    """Return what an example is, where examples have positions or tokens in common.

    Args:
        config: of the run; `shape` begins with the length of a window.
    """
    objective = config["objective"]["kind"]
    length = config["shape"][0]
    if config["dp_unit"] != "example":
        return []
    if objective == "trajectory":
        count = length + 1  # the position that is predicted belongs to the example
        return [
            f"an example is a window of {count} positions: one position may be in {count} "
            "examples, and costs as much as all of them"
        ]
    if objective == "language":
        return [
            f"an example is a window of {length} tokens and the tokens that follow, and no "
            "article, speech or person: neighbouring windows share a token, and a text costs as "
            "much as all of its windows"
        ]
    return []


def _release_entry(row: Row) -> Section:
    """Return a row of the ledger's summary as an entry of `releases`."""
    return {
        "method": row.method,
        "field": row.field,
        "mechanism": row.mechanism,
        "noise_multiplier": row.noise_multiplier,
        "times": row.count,
        "reader": row.reader,
    }


def _masks(name: str, padding_bytes: int) -> list[Section]:
    """Return the masks of a run.

    Args:
        name: of the run's mask; "none" is no mask.
        padding_bytes: bytes that the mask adds to every update and every average.
    """
    if name == "none":
        return []
    mask = {
        "kind": name,
        "fresh": "each call",
        # a mask gives no differential privacy
        "is": "obfuscation",
        "padding_bytes": padding_bytes,
    }
    return [mask]

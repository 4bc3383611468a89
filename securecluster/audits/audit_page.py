"""The page of an audit: the report of the run, and what each attack achieved, with pictures."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.attacks.base import Truth
from securecluster.attacks.registry import attack_named
from securecluster.attacks.scoring import BETTER, CHANCE
from securecluster.audits import audit_summary
from securecluster.audits.findings import BROKEN, VISIBLE, Finding
from securecluster.audits.run_audit import (
    COLUMNS,
    READING,
    RUN,
    SERVER,
    TWIN,
    Adversary,
    Audit,
    lines,
    score_text,
    unscored,
    without_errors,
)
from securecluster.core.number_format import printable
from securecluster.protections.registry import ADVISED, AGGREGATIONS
from securecluster.reports import bundle, report_page
from securecluster.reports import html_page as html
from securecluster.reports.finished_run import FinishedRun
from securecluster.statements import odds

MOST_CLIENTS = 3  # with pictures of their own
MOST_IMAGES = 8  # of one client
MOST_CLASSES = 20  # bars of a chart
RATES = ("false positive rate", "true positive rate")  # axes of ROC curves
EXPLAINED = (
    "Each attack guesses something about clients from what the adversary observed. "
    f"{READING} A score beyond the range is better than chance if its own interval, a bootstrap "
    "over clients, lies beyond the range, too. What is better than chance is broken where the run "
    "claims a protection that is said to hide it, and is else visible, as the report says. "
    "Audits of noise repeat what clients release, with canaries, and bound ε from below. A bound "
    "above the ledger's ε refutes it. One below is at chance where the bound without any noise "
    "would have been above it; else the audit could not tell. "
    "The adversary knows the configuration and some test samples as public ones; attacks on "
    "membership are asked about these and as many training samples."
)
LIMITS = (
    "A score at chance means that this attack failed with so few clients. It does not prove that "
    "no attack can succeed: only a finite ε bounds all of them."
)
# settings that lower an attack's score
HIDDEN_SUMS = AGGREGATIONS[ADVISED].advice
NOISE = "noise (--clip S --noise Z, or --target-epsilon E): the more, the nearer to chance"
MASK = "a mask (--mask permutation or rotation): coordinates lose their meaning"
BATCHES = "larger batches, or more local steps (--batch-size, --epochs)"
EIGENVECTORS = (
    "sealed eigenvectors (--sealed): the server cannot open them, and other clients can",
    "a noisy Gram matrix (--gram-noise Z): its noise bounds what eigenvectors reveal",
)
OF_CLIENTS = (
    "noise for whole clients (--signature-noise Z --dp-unit client): shares of classes are no "
    "single sample's, so noise for samples does not cover them"
)
OF_SIGNATURES = "noise on signatures (--signature-noise Z): the more, the nearer to chance"
FEWER = "fewer rounds, or fewer releases a round"
SAME_MEMBERS = (
    "the same clients in every sum (--participation 1, as long as none is lost): sums over rounds "
    "then tell no client from another"
)
COHORTS = "larger cohorts in secure sums (--cohort-size): a sum is over whole ones"
LOWERED_BY = {
    "label-counts": (MASK, HIDDEN_SUMS, NOISE),
    "linkage": (HIDDEN_SUMS, NOISE),  # masks keep inner products
    "label-distributions": (HIDDEN_SUMS, NOISE),
    "gradient-inversion-analytic": (MASK, HIDDEN_SUMS, NOISE, BATCHES),
    "gradient-inversion-cosine": (MASK, HIDDEN_SUMS, NOISE, BATCHES),
    "gradient-inversion-dlg": (MASK, HIDDEN_SUMS, NOISE, BATCHES),
    "mean-image": EIGENVECTORS,
    "subspace-composition": EIGENVECTORS,
    "subspace-membership": EIGENVECTORS,
    "signature-label-counts": (OF_CLIENTS,),
    "signature-membership": (MASK, OF_SIGNATURES),
    # two secure sums are subtracted as well as two plain ones
    "hidden-differencing": (NOISE,),
    "hidden-cluster": (NOISE,),
    "hidden-label-counts": (MASK, NOISE),
    "hidden-membership": (MASK, NOISE),
    "sums-over-rounds-clusters": (COHORTS, SAME_MEMBERS, NOISE),
    "sums-over-rounds-labels": (MASK, COHORTS, SAME_MEMBERS, NOISE),
    "sums-over-rounds-sizes": (COHORTS, SAME_MEMBERS, NOISE),
}
GENERAL = (HIDDEN_SUMS, NOISE, FEWER)


def page(run: FinishedRun, audit: Audit, command: str) -> str:
    """Return the report of a run with the results of its audit.

    What the attacks saw is for the owner of the data, also on the unprotected twin, whose pictures
    show clients' data as they are: the section is marked for no copy.

    Args:
        run: the run.
        audit: the results.
        command: that made the audit.
    """
    sections = [
        audit_summary.section(
            audit, len(run.names), guarantee(run, audit.adversary), facts_of(run)
        ),
        results(audit),
        advice(audit),
        pictures(audit),
        report_page.summary(run),
        report_page.threat_model(run),
        report_page.who_saw_what(run),
        report_page.guarantee(run),
        report_page.messages(run),
        report_page.pictures(run),
        report_page.reproduction(run, command),
    ]
    return html.document(report_page.title("Audit", run), sections)


def facts_of(run: FinishedRun) -> list[tuple[str, str]]:
    """Return by which a reader knows the run again, as rows of a table.

    Args:
        run: the run.
    """
    return [
        ("run", f"{run.folder.resolve().name}, by securecluster {run.result['version']}"),
        ("SHA-256 of the run", f"{bundle.digest(run)} (config.json and result.json of a bundle)"),
    ]


def summary(run: FinishedRun, audit: Audit) -> str:
    """Return what the adversary could learn, as a paragraph that names no client.

    Args:
        run: the run.
        audit: the results.
    """
    return audit_summary.summary(audit, len(run.names), guarantee(run, audit.adversary))


def guarantee(run: FinishedRun, adversary: Adversary) -> str:
    """Return what ε bounds of what an adversary could learn, in a sentence.

    Args:
        run: the run.
        adversary: that attacks.
    """
    privacy = run.result["privacy"]
    if privacy["epsilon"] is None:
        return "No ε bounds what attacks that were not tried could learn: it is infinite."
    if run.config["network"].get("placement") == "central" and SERVER in adversary.parties:
        return "The server adds the noise itself, so no ε bounds what it could learn."
    (sentence, *_) = odds.in_words(privacy)
    return (
        "Differential privacy bounds every attack, also those that were not tried, as far as its "
        f"assumptions below hold. {sentence} That is ε: {report_page.epsilon_text(privacy)}."
    )


def results(audit: Audit) -> str:
    """Return the table attack × as run × unprotected, what means most to people first.

    Args:
        audit: the results.
    """
    rows = []
    needs = []
    said = []
    for finding, twin in audit_summary.ordered(audit):
        result_of = finding.score or twin.score
        if result_of is None:
            continue
        better = "higher" if result_of.higher else "lower"
        score = f"{finding.attack}: {result_of.metric} ({better} is a better attack)"
        cells = [finding.learns[:1].upper() + finding.learns[1:], score]
        for result, judgement in ((finding, finding.judgement), (twin, twin.outcome)):
            cells += [without_errors(score_text(result)), judgement if result.score else "–"]
        kinds = ["", "", "", _kind(finding), "", ""]
        rows.append([(text, style) for text, style in zip(cells, kinds, strict=True)])
        attack = attack_named(finding.attack)
        needs.append(f"{finding.attack}: needs {attack.needs}. Source: {attack.source}.")
        said += [f"{finding.attack}: {text}." for text in finding.said]
    headings = ["what would be learned", "attack and score"]
    for column in COLUMNS.values():
        headings += [column, f"verdict, {column}"]
    stopped = unscored(audit, lambda finding: not finding.inapplicable)
    inapplicable = unscored(audit, lambda finding: finding.inapplicable)
    named = []
    if audit.adversary.text != audit.adversary.numbered:
        named.append(html.uncovered(html.paragraph(f"By name, it is {audit.adversary.text}.")))
    blocks = [html.table(headings, rows)] if rows else []
    if said:
        blocks.append(html.subsection("What guesses rest on", html.items(said)))
    if stopped:
        blocks.append(html.subsection("Attacks that did not end", _reasons(stopped)))
    count = sum(map(len, inapplicable.values()))
    line = f"{count} attacks apply neither to the run nor to its unprotected twin: why"
    return html.section(
        "Attacks",
        *named,
        html.shown(
            *blocks,
            html.items(lines(audit)),
            html.folded(line, _reasons(inapplicable)),
            html.paragraph(_unprotected(audit)),
            html.items(audit.notes),
            html.paragraph(LIMITS),
            html.folded("How to read the scores", html.paragraph(EXPLAINED)),
            html.folded("What each attack needs, and its source", html.items(needs)),
        ),
    )


def _reasons(attacks: Mapping[str, Sequence[str]]) -> str:
    """Return why attacks have no score, as a list.

    Args:
        attacks: by reason.
    """
    texts = []
    for reason, names in attacks.items():
        words = ", ".join(names)
        texts.append(without_errors(f"{words}: {reason}"))
    return html.items(texts)


def _unprotected(audit: Audit) -> str:
    """Return what the unprotected run is without, as a sentence."""
    if audit.no_twin:
        return audit.no_twin
    protections = ", ".join(f"{name} {value}" for name, value in audit.protections.items())
    if protections:
        return f"The unprotected run is the same run without: {protections}."
    return "The unprotected run is the same run."


def _kind(finding: Finding) -> str:
    """Return the class of a verdict's cell."""
    if finding.held or (finding.bounds and finding.verdict == CHANCE):
        return "good"
    return {BROKEN: "bad", VISIBLE: "seen"}.get(finding.verdict, html.PLAIN)


def pictures(audit: Audit) -> str:
    """Return what the guesses look like.

    Args:
        audit: the results.
    """
    blocks = []
    for position, finding in enumerate(audit.findings[RUN]):
        shown = []
        columns = {COLUMNS[RUN]: finding, COLUMNS[TWIN]: audit.findings[TWIN][position]}
        if audit.findings[RUN] is audit.findings[TWIN]:
            del columns[COLUMNS[TWIN]]
        for column, result in columns.items():
            shown += list(_pictures_of(result, column))
        shown += list(_roc(columns))
        if shown:
            blocks.append(html.subsection(finding.attack, *shown))
    return html.section("What the attacks saw", *blocks)


def _pictures_of(finding: Finding, column: str) -> Iterator[str]:
    """Yield the pictures of one guess.

    Args:
        finding: with the guess.
        column: "as run" or "unprotected".
    """
    if finding.guess is None or finding.truth is None:
        return
    if finding.guess.quantity == "label counts":
        yield from _label_counts(finding, column)
    images = finding.guess.details.get("images")
    # attacks that guess samples have them as their values
    if images is None and finding.guess.quantity == "samples":
        images = finding.guess.values
    if isinstance(images, Mapping):
        yield from _images(images, finding.truth, column)


def _label_counts(finding: Finding, column: str) -> Iterator[str]:
    """Yield for the first clients a chart of the true and guessed share of each label.

    They are shares on one scale, since an attack that is told no client's size guesses no counts.
    """
    assert finding.guess is not None and finding.truth is not None
    for client, counts in list(finding.guess.values.items())[:MOST_CLIENTS]:
        true = finding.truth.label_counts(client)
        federation = finding.truth.federation
        classes = federation.class_names or range(len(true))
        labels = [printable(str(label)) for label in classes[:MOST_CLASSES]]
        name = printable(federation.names[client])
        series = [
            ("true", (true / true.sum())[:MOST_CLASSES].tolist()),
            ("guessed", (counts / counts.sum())[:MOST_CLASSES].tolist()),
        ]
        yield html.bars(f"Labels of client {name}, {column} (shares)", labels, series)


def _images(images: Mapping[Any, Any], truth: Truth, column: str) -> Iterator[str]:
    """Yield reconstructed images, each beside the original that it is nearest to.

    Args:
        images: reconstructions (n, …) by client; those that are no images are left out.
        truth: with the originals.
        column: "as run" or "unprotected".
    """
    shown = []
    for client, guesses in list(images.items())[:MOST_CLIENTS]:
        name = printable(truth.federation.names[client])
        for guess in np.asarray(guesses)[:MOST_IMAGES]:
            if not _is_image(guess):
                continue
            pair = html.pixels(png(guess), f"{name}: reconstructed")
            original = nearest(guess, np.asarray(truth.federation.shards[client].x))
            pair = html.pixels(png(original), f"{name}: original") + pair
            shown.append(f'<span class="pair">{pair}</span>')
    if shown:
        yield html.paragraph(f"Samples by name of the client, {column}")
        yield "<div>" + "".join(shown) + "</div>"


def _is_image(sample: NDArray[Any]) -> bool:
    """Return True for (height, width) and for one or three channels of that."""
    return sample.ndim == 2 or (sample.ndim == 3 and sample.shape[0] in (1, 3))


def nearest(guess: NDArray[Any], samples: NDArray[Any]) -> NDArray[Any]:
    """Return the sample with the smallest distance to a guess.

    Args:
        guess: of the shape of a sample, or with other axes of length 1.
        samples: (n, …).
    """
    rows = samples.reshape(len(samples), -1).astype(np.float64)
    distances = np.linalg.norm(rows - np.nan_to_num(guess.reshape(1, -1)), axis=1)
    closest: NDArray[Any] = samples[int(distances.argmin())]
    return closest


def png(image: Any) -> bytes:
    """Return an image as the content of a PNG file.

    Args:
        image: (height, width), or (1 or 3, height, width); its values are scaled to black and
            white.
    """
    from matplotlib.image import imsave

    pixels = np.asarray(image, dtype=np.float64)
    if pixels.ndim == 3:
        pixels = pixels[0] if pixels.shape[0] == 1 else pixels.transpose(1, 2, 0)
    pixels = np.nan_to_num(pixels)
    span = max(float(np.ptp(pixels)), 1e-12)
    scaled = (pixels - pixels.min()) / span
    buffer = io.BytesIO()
    imsave(buffer, scaled, cmap="gray", vmin=0, vmax=1, format="png")
    return buffer.getvalue()


def _roc(columns: Mapping[str, Finding]) -> Iterator[str]:
    """Yield the ROC curves of an attack that gives a number for members and non-members.

    Its guess has `details["roc"]`, a pair of what members and non-members are given, or is about
    the membership of `details["candidates"]`.
    """
    series = []
    for column, finding in columns.items():
        scores = _given(finding)
        if scores is not None:
            points = roc(*scores)
            series.append((f"{column} (area {_area(points):.2f})", points))
    if series:
        names = ", ".join(name for name, _ in series)
        yield html.curves(f"Members found: {names}; the diagonal is chance", RATES, series)


def _given(finding: Finding) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Return what an attack gives to members and to non-members; None if it tells no members."""
    guess = finding.guess
    if guess is None or finding.truth is None:
        return None
    if "roc" in guess.details:
        members, others = guess.details["roc"]
        return np.asarray(members), np.asarray(others)
    if guess.quantity != "membership" or "candidates" not in guess.details:
        return None
    candidates = np.asarray(guess.details["candidates"])
    client_values = []
    is_member = []
    for client, values in guess.values.items():
        client_samples = {
            sample.tobytes() for sample in np.asarray(finding.truth.federation.shards[client].x)
        }
        client_values.append(np.asarray(values))
        is_member.append([sample.tobytes() in client_samples for sample in candidates])
    flags = np.concatenate(is_member)
    scores = np.concatenate(client_values)
    return scores[flags], scores[~flags]


def _area(points: Sequence[tuple[float, float]]) -> float:
    """Return the area under a curve of straight lines."""
    pairs = pairwise(points)
    return sum((right[0] - left[0]) * (left[1] + right[1]) / 2 for left, right in pairs)


def roc(members: NDArray[Any], others: NDArray[Any]) -> list[tuple[float, float]]:
    """Return the points of a ROC curve, from (0, 0) to (1, 1).

    Args:
        members: what the attack gives to members, (n,); larger is more likely a member.
        others: what it gives to non-members, (m,).
    """
    thresholds = np.unique(np.concatenate([members, others]))[::-1]
    if len(thresholds) > 200:
        thresholds = np.quantile(thresholds, np.linspace(1, 0, 200))
    points = [(0.0, 0.0)]
    for threshold in thresholds:
        false = float(np.mean(others >= threshold))
        true = float(np.mean(members >= threshold))
        points.append((false, true))
    points.append((1.0, 1.0))
    return points


def advice(audit: Audit) -> str:
    """Return which settings would lower the scores that are better than chance.

    Args:
        audit: the results.
    """
    blocks = []
    for finding in audit.findings[RUN]:
        if finding.outcome == BETTER:
            advised = _advised(finding.attack, audit.protections)
            blocks.append(html.subsection(finding.attack, html.items(advised)))
    if not audit.tried:
        blocks.append(html.paragraph("No attack could be tried on the run: nothing is advised."))
    elif not blocks:
        blocks.append(html.paragraph("No attack of this audit is better than chance on the run."))
    return html.section("Settings that would lower the scores", html.shown(*blocks))


def _advised(attack: str, protections: Mapping[str, Any]) -> Iterable[str]:
    """Return what lowers an attack's score and is not in use yet.

    Args:
        attack: its name.
        protections: options of the run that protect.
    """
    in_use = {"mask": MASK, "aggregation": HIDDEN_SUMS}
    options = {in_use[name] for name in protections if name in in_use}
    advised = []
    for setting in LOWERED_BY.get(attack, GENERAL):
        if setting == NOISE and protections.get("clip"):
            setting = "more noise: raise --noise, or lower --target-epsilon"
        if setting not in options:
            advised.append(setting)
    return advised

"""The page of an audit: the report of the run, and what each attack achieved, with pictures."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.app import html_page as html
from securecluster.app import report_page
from securecluster.app.audit import (
    REFUTED,
    RUN,
    TWIN,
    WITHIN,
    Audit,
    Finding,
    both_reasons,
    score_text,
)
from securecluster.app.finished_run import FinishedRun
from securecluster.app.number_format import printable
from securecluster.attacks.base import Truth
from securecluster.attacks.registry import attack_named
from securecluster.attacks.scoring import BETTER, CHANCE, UNDECIDED

PAGE = "audit.html"
RESULT = "audit.json"
MOST_CLIENTS = 3  # with pictures of their own
MOST_IMAGES = 8  # of one client
MOST_CLASSES = 20  # bars of a chart
COLUMNS = {RUN: "as run", TWIN: "unprotected"}
READING = (
    "Each attack guesses something about clients from what the adversary observed. Its score has a "
    "95 % bootstrap interval over clients. Chance is what the same guess reaches against a truth "
    "whose clients are shuffled: its mean, and the range that 95 % of shuffles are in. A score "
    "within that range is at chance. A score beyond it is better than chance if its own interval "
    "lies beyond the range, too; else nothing is decided, and more clients would tell. "
    "Audits of noise repeat what clients release, with canaries, and bound ε from below. A bound "
    "above the ledger's ε refutes it; one below proves nothing. Their unprotected twin has no "
    "noise. "
    "The adversary knows the configuration and some test samples as public ones; attacks on "
    "membership are asked about these and as many training samples."
)
LIMITS = (
    "A score at chance means that this attack failed with so few clients. It does not prove that "
    "no attack can succeed: only a finite ε bounds all of them."
)
# settings that lower an attack's score
SECURE_SUMS = "secure sums (--aggregation secagg): no single update is left to be attacked"
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
LOWERED_BY = {
    "label-counts": (MASK, SECURE_SUMS, NOISE),
    "linkage": (SECURE_SUMS, NOISE),  # masks keep inner products
    "label-distributions": (SECURE_SUMS, NOISE),
    "gradient-inversion-analytic": (MASK, SECURE_SUMS, NOISE, BATCHES),
    "gradient-inversion-cosine": (MASK, SECURE_SUMS, NOISE, BATCHES),
    "gradient-inversion-dlg": (MASK, SECURE_SUMS, NOISE, BATCHES),
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
}
GENERAL = (SECURE_SUMS, NOISE, FEWER)


def page(run: FinishedRun, audit: Audit, command: str, with_truth: bool = True) -> str:
    """Return the report of a run with the results of its audit.

    Args:
        run: the run.
        audit: the results.
        command: that made the audit.
        with_truth: False leaves out pictures that show clients' data, such as the originals beside
            reconstructions.
    """
    sections = [
        report_page.summary(run),
        results(audit),
        pictures(audit, with_truth),
        advice(audit),
        report_page.threat_model(run),
        report_page.who_saw_what(run),
        report_page.guarantee(run),
        report_page.messages(run),
        report_page.pictures(run),
        report_page.reproduction(run, command),
    ]
    return html.document(report_page.title("Audit", run), sections)


def results(audit: Audit) -> str:
    """Return the table attack × as run × unprotected.

    Args:
        audit: the results.
    """
    rows = []
    needs = []
    unscored: dict[str, list[str]] = {}
    for finding, twin in zip(audit.findings[RUN], audit.findings[TWIN], strict=True):
        scored = finding.score or twin.score
        if scored is None:
            unscored.setdefault(both_reasons(finding, twin), []).append(finding.attack)
            continue
        better = "higher" if scored.higher else "lower"
        metric = f"{scored.metric} ({better} is a better attack)"
        cells = [finding.attack, metric]
        for result in (finding, twin):
            cells += [score_text(result), result.verdict if result.score else "–"]
        kinds = ["", "", "", _kind(finding), "", ""]
        rows.append([(text, style) for text, style in zip(cells, kinds, strict=True)])
        attack = attack_named(finding.attack)
        needs.append(f"{finding.attack}: needs {attack.needs}. Source: {attack.source}.")
    headings = ["attack", "score"]
    for column in COLUMNS.values():
        headings += [column, f"verdict, {column}"]
    protections = ", ".join(f"{name} {value}" for name, value in audit.protections.items())
    without = "The unprotected run is the same run."
    if protections:
        without = f"The unprotected run is the same run without: {protections}."
    time = f"{audit.seconds:.0f} s of a budget of {audit.budget:g} s"
    reasons = [f"{', '.join(names)}: {reason}" for reason, names in unscored.items()]
    blocks = [html.table(headings, rows)] if rows else []
    if reasons:
        blocks.append(html.subsection("Attacks without a score", html.items(reasons)))
    return html.section(
        "Attacks",
        html.paragraph(_outcome(audit)),
        html.paragraph(f"The adversary is {audit.adversary.text}. {READING}"),
        *blocks,
        html.paragraph(LIMITS),
        html.paragraph(without),
        html.items(audit.notes),
        html.subsection("What each attack needs", html.items(needs)),
        html.paragraph(f"The audit took {time}.", "note"),
    )


def _outcome(audit: Audit) -> str:
    """Return in one sentence which attacks are better than chance on the run."""
    scored = [finding for finding in audit.findings[RUN] if finding.score is not None]
    if not scored:
        return "No attack of this audit has a score on the run."
    better = [finding.attack for finding in scored if finding.verdict == BETTER]
    undecided = [finding.attack for finding in scored if finding.verdict == UNDECIDED]
    text = f"Better than chance on the run: {len(better)} of {len(scored)} attacks with a score"
    if better:
        text += f" ({', '.join(better)})"
    text += "."
    if undecided:
        text += f" Not decided: {', '.join(undecided)}."
    return text


def _kind(finding: Finding) -> str:
    """Return the class of a verdict's cell."""
    if finding.score is None:
        return html.PLAIN
    kinds = {BETTER: "bad", REFUTED: "bad", CHANCE: "good", WITHIN: "good"}
    return kinds.get(finding.verdict, html.PLAIN)


def pictures(audit: Audit, with_truth: bool) -> str:
    """Return what the guesses look like.

    Args:
        audit: the results.
        with_truth: False leaves out clients' data.
    """
    blocks = []
    for position, finding in enumerate(audit.findings[RUN]):
        shown = []
        columns = {COLUMNS[RUN]: finding, COLUMNS[TWIN]: audit.findings[TWIN][position]}
        if audit.findings[RUN] is audit.findings[TWIN]:
            del columns[COLUMNS[TWIN]]
        for column, result in columns.items():
            shown += list(_pictures_of(result, column, with_truth))
        shown += list(_roc(columns))
        if shown:
            blocks.append(html.subsection(finding.attack, *shown))
    return html.section("What the attacks saw", *blocks)


def _pictures_of(finding: Finding, column: str, with_truth: bool) -> Iterator[str]:
    """Yield the pictures of one guess.

    Args:
        finding: with the guess.
        column: "as run" or "unprotected".
        with_truth: False leaves out clients' data.
    """
    if finding.guess is None or finding.truth is None:
        return
    if finding.guess.quantity == "label counts" and with_truth:
        yield from _label_counts(finding, column)
    images = finding.guess.details.get("images")
    # attacks that guess samples have them as their values
    if images is None and finding.guess.quantity == "samples":
        images = finding.guess.values
    if isinstance(images, Mapping):
        yield from _images(images, finding.truth, column, with_truth)


def _label_counts(finding: Finding, column: str) -> Iterator[str]:
    """Yield for the first clients a chart of the true and guessed share of each label.

    They are shares on one scale, since an attack that is told no client's size guesses no counts.
    """
    assert finding.guess is not None and finding.truth is not None
    for client, counts in list(finding.guess.values.items())[:MOST_CLIENTS]:
        true = finding.truth.label_counts(client)
        labels = [str(label) for label in range(min(len(true), MOST_CLASSES))]
        name = printable(finding.truth.federation.names[client])
        series = [
            ("true", (true / true.sum())[:MOST_CLASSES].tolist()),
            ("guessed", (counts / counts.sum())[:MOST_CLASSES].tolist()),
        ]
        yield html.bars(f"Labels of client {name}, {column} (shares)", labels, series)


def _images(
    images: Mapping[Any, Any], truth: Truth, column: str, with_truth: bool
) -> Iterator[str]:
    """Yield reconstructed images, each beside the original that it is nearest to.

    Args:
        images: reconstructions (n, …) by client; those that are no images are left out.
        truth: with the originals.
        column: "as run" or "unprotected".
        with_truth: False leaves out the originals.
    """
    shown = []
    for client, guesses in list(images.items())[:MOST_CLIENTS]:
        name = printable(truth.federation.names[client])
        for guess in np.asarray(guesses)[:MOST_IMAGES]:
            if not _is_image(guess):
                continue
            pair = html.pixels(png(guess), f"{name}: reconstructed")
            if with_truth:
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
            series.append((column, roc(*scores)))
    if series:
        names = ", ".join(name for name, _ in series)
        yield html.curves(f"True positives over false positives: {names}", series)


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
    given = []
    is_member = []
    for client, values in guess.values.items():
        client_samples = {
            sample.tobytes() for sample in np.asarray(finding.truth.federation.shards[client].x)
        }
        given.append(np.asarray(values))
        is_member.append([sample.tobytes() in client_samples for sample in candidates])
    flags = np.concatenate(is_member)
    scores = np.concatenate(given)
    return scores[flags], scores[~flags]


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
        if finding.verdict == BETTER:
            advised = _advised(finding.attack, audit.protections)
            blocks.append(html.subsection(finding.attack, html.items(advised)))
    if not blocks:
        blocks.append(html.paragraph("No attack of this audit is better than chance on the run."))
    return html.section("Settings that would lower the scores", *blocks)


def _advised(attack: str, protections: Mapping[str, Any]) -> Iterable[str]:
    """Return what lowers an attack's score and is not in use yet.

    Args:
        attack: its name.
        protections: options of the run that protect.
    """
    in_use = {"mask": MASK, "aggregation": SECURE_SUMS}
    options = {in_use[name] for name in protections if name in in_use}
    advised = []
    for setting in LOWERED_BY.get(attack, GENERAL):
        if setting == NOISE and protections.get("clip"):
            setting = "more noise: raise --noise, or lower --target-epsilon"
        if setting not in options:
            advised.append(setting)
    return advised

"""The beginning of an audit's page: what the adversary could learn, in words for everybody.

Whoever answers for the data reads this paragraph alone: what could be learned, about whom, under
which assumptions, what was tried and what could not be. Findings are in the order of what they mean
for the people in the data: protections that broke first, then what is visible, and within these
records before memberships, contents, groups and messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from securecluster.attacks.scoring import BETTER, UNDECIDED
from securecluster.audits.run_audit import (
    BROKEN,
    RUN,
    TWIN,
    VISIBLE,
    WIRE,
    WITHIN,
    Adversary,
    Audit,
    Finding,
)
from securecluster.reports import html_page as html

HEADING = "In short"
MOST_NAMED = 4  # findings of one kind in a sentence
# of findings, by what the adversary has of them
OUTCOMES = ("broken", "visible", "undecided", "resisted", "bounded", "none")
NO_PROOF = "That is no proof that no attack can."


def ordered(audit: Audit) -> list[tuple[Finding, Finding]]:
    """Return the findings on the run and on its twin, what means most to people first.

    Args:
        audit: the results.
    """
    pairs = list(zip(audit.findings[RUN], audit.findings[TWIN], strict=True))
    return sorted(pairs, key=lambda pair: (OUTCOMES.index(outcome(pair[0])), pair[0].harm))


def outcome(finding: Finding) -> str:
    """Return which of `OUTCOMES` a finding on the run is.

    Args:
        finding: on the run.
    """
    if finding.score is None:
        return "none"
    if finding.verdict == WITHIN:
        return "bounded"
    if finding.standing == BROKEN:
        return "broken"
    if finding.standing == VISIBLE:
        return "visible"
    return "undecided" if finding.verdict == UNDECIDED else "resisted"


def summary(audit: Audit, clients: int, guarantee: str) -> str:
    """Return what the adversary could learn, as a paragraph that names no client.

    Args:
        audit: the results.
        clients: their number.
        guarantee: what ε bounds, in a sentence.
    """
    return " ".join([*_answers(audit, clients), guarantee])


def section(audit: Audit, text: str, facts: Sequence[tuple[str, str]]) -> str:
    """Return the paragraph, and the table of what was audited, when and with what.

    Args:
        audit: the results.
        text: the paragraph.
        facts: further rows of the table, on what was audited.
    """
    made = [
        *facts,
        ("audited", f"{audit.made:%Y-%m-%d %H:%M} UTC, with securecluster {audit.version}"),
        ("time", f"{audit.seconds:.0f} s of a budget of {audit.budget:g} s"),
    ]
    return html.section(HEADING, html.shown(html.paragraph(text), facts_table(made)))


def facts_table(facts: Sequence[tuple[str, str]]) -> str:
    """Return what was audited as a table, whose digests break anywhere.

    Args:
        facts: name and text of each.
    """
    return html.table(("", ""), [(name, (text, html.LONG)) for name, text in facts])


def _answers(audit: Audit, clients: int) -> Iterator[str]:
    """Yield what the adversary could learn, in sentences.

    Args:
        audit: the results.
        clients: their number.
    """
    adversary = audit.adversary.numbered
    ran = [finding for finding in audit.findings[RUN] if finding.guess is not None]
    if audit.tried:
        yield (
            f"What could {adversary} learn about the {clients} clients and the records that they "
            "hold?"
        )
    elif ran:
        yield (
            f"Nothing was measured: {len(ran)} of {len(audit.findings[RUN])} attacks guessed "
            f"something from what {adversary} observed of {clients} clients, and without the "
            "clients' data nobody knows whether they are right."
        )
    else:
        yield (
            f"Nothing was tried: none of {len(audit.findings[RUN])} attacks has what it needs in "
            f"what {adversary} observed of {clients} clients, so this page says neither that data "
            "are safe nor that they are not."
        )
    yield assumption(audit.adversary)
    by_outcome: dict[str, list[Finding]] = {}
    for finding, _ in ordered(audit):
        by_outcome.setdefault(outcome(finding), []).append(finding)
    said: set[str] = set()
    for outcome_name in OUTCOMES[:-1]:
        # what one attack learns is not also what another one does not
        findings = by_outcome.get(outcome_name, ())
        new = [finding for finding in findings if finding.learns not in said]
        if new:
            yield _sentence(outcome_name, new)
        said |= {finding.learns for finding in new}
    prevented = _prevented(audit)
    if prevented:
        yield f"Without the protections of the run, attacks also learn {_named(prevented)}."
    yield from _untried(audit)


def assumption(adversary: Adversary) -> str:
    """Return what is assumed of an adversary, in a sentence.

    Args:
        adversary: that attacks.
    """
    text = (
        "It is taken to follow the protocol, to keep and study all that it observes, and to know "
        "the configuration and some public samples"
    )
    if adversary.parties == (WIRE,):
        text = "It is taken to see who sends, when, and how long each message is, not what it says"
    if adversary.clients:
        text += f", and the data and keys of {len(adversary.clients)} of the clients"
    return f"{text}."


def _sentence(outcome_name: str, findings: Sequence[Finding]) -> str:
    """Return what findings of one kind say.

    Args:
        outcome_name: one of `OUTCOMES`.
        findings: of this kind.
    """
    learned = _named(findings)
    if outcome_name == "broken":
        protections = ", ".join(dict.fromkeys(finding.protections for finding in findings))
        return f"It could learn {learned}. The run claims to hide it, by {protections}: this broke."
    if outcome_name == "visible":
        return f"It could learn {learned}. This run claims to hide none of it."
    if outcome_name == "undecided":
        return f"With so few clients it is not decided whether it could learn {learned}."
    if outcome_name == "bounded":
        return f"Audits of the noise found no more than the ledger's ε allows: {learned}."
    return f"The attacks of this audit did no better than chance at learning {learned}. {NO_PROOF}"


def _prevented(audit: Audit) -> list[Finding]:
    """Return the findings that are better than chance on the unprotected twin alone."""
    prevented = []
    learned = set()
    for finding, twin in ordered(audit):  # those that learned on the run come first
        if outcome(finding) in OUTCOMES[:2]:
            learned.add(finding.learns)
        elif twin.verdict == BETTER and finding.learns not in learned:
            prevented.append(finding)
    return prevented


def _untried(audit: Audit) -> Iterator[str]:
    """Yield how many attacks could not be tried, and why."""
    unscored = [finding for finding in audit.findings[RUN] if finding.score is None]
    attack_count = len(audit.findings[RUN])
    if not audit.tried:
        return
    if not unscored:
        yield f"All {attack_count} attacks were tried."
        return
    inapplicable = [finding for finding in unscored if finding.inapplicable]
    text = f"{len(audit.tried)} of {attack_count} attacks could be tried"
    if inapplicable:
        text += f", and {len(inapplicable)} found nothing to work on in this run"
    stopped = len(unscored) - len(inapplicable)
    if stopped:
        text += f"; {stopped} failed or took too long, so nothing is known of these"
    yield f"{text}."


def _named(findings: Sequence[Finding]) -> str:
    """Return in words what findings are about."""
    words = list(dict.fromkeys(finding.learns for finding in findings))
    named = "; ".join(words[:MOST_NAMED])
    if len(words) > MOST_NAMED:
        named += f"; and {len(words) - MOST_NAMED} more, listed below"
    return named

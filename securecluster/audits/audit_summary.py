"""The beginning of an audit's page: what the adversary could learn, in words for everybody.

Whoever answers for the data reads one sentence, and then a few lines: who attacked, what else was
learned, what was not, what this audit could not tell, and what ε limits. Findings are in the order
of what they mean for the people in the data: protections that broke first, then what is visible,
then what could not be told, and within these records before memberships, contents, groups and
messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from securecluster.attacks.scoring import BETTER, CHANCE
from securecluster.audits.findings import BROKEN, NOT_TRIED, UNTOLD, VERDICTS, VISIBLE, Finding
from securecluster.audits.run_audit import RUN, TWIN, WIRE, Adversary, Audit
from securecluster.reports import html_page as html

HEADING = "In short"
MOST_NAMED = 4  # findings of one kind in a sentence
NO_PROOF = "That is no proof that no attack can."


def ordered(audit: Audit) -> list[tuple[Finding, Finding]]:
    """Return the findings on the run and on its twin, what means most to people first.

    Args:
        audit: the results.
    """
    pairs = list(zip(audit.findings[RUN], audit.findings[TWIN], strict=True))
    return sorted(pairs, key=lambda pair: (VERDICTS.index(pair[0].verdict), pair[0].harm))


def summary(audit: Audit, clients: int, guarantee: str) -> str:
    """Return what the adversary could learn, as a paragraph that names no client.

    Args:
        audit: the results.
        clients: their number.
        guarantee: what ε bounds, in a sentence.
    """
    return " ".join([headline(audit, clients), *lines(audit, guarantee)])


def section(audit: Audit, clients: int, guarantee: str, facts: Sequence[tuple[str, str]]) -> str:
    """Return the headline, the lines, and the table of what was audited, when and with what.

    Args:
        audit: the results.
        clients: their number.
        guarantee: what ε bounds, in a sentence.
        facts: further rows of the table, on what was audited.
    """
    made = [
        *facts,
        ("audited", f"{audit.made:%Y-%m-%d %H:%M} UTC, with securecluster {audit.version}"),
        ("time", f"{audit.seconds:.0f} s of a budget of {audit.budget:g} s of a processor"),
    ]
    return html.section(
        HEADING,
        html.shown(
            html.paragraph(headline(audit, clients), "headline"),
            html.items(lines(audit, guarantee)),
            facts_table(made),
        ),
    )


def headline(audit: Audit, clients: int) -> str:
    """Return what the adversary could learn, in one sentence.

    Args:
        audit: the results.
        clients: their number.
    """
    who = audit.adversary.numbered
    who = who[:1].upper() + who[1:]
    of = f"of the {clients} clients and their records"
    found = {verdict: _found(audit, verdict) for verdict in VERDICTS}
    ran = [finding for finding in audit.findings[RUN] if finding.guess is not None]
    if found[BROKEN]:
        protections = ", ".join(dict.fromkeys(finding.protections for finding in found[BROKEN]))
        return (
            f"{who} could learn {_named(found[BROKEN])}: the run claims to hide this by "
            f"{protections}, which broke."
        )
    if found[VISIBLE]:
        return f"{who} could learn {_named(found[VISIBLE])}: no protection of this run hides it."
    failed = len(audit.judged(CHANCE))
    if failed:
        text = f"{who} learned nothing {of} by attacks that succeed without protection ({failed})"
        untold = len(audit.judged(UNTOLD))
        return f"{text}; of {untold} more this audit could not tell." if untold else f"{text}."
    if audit.tried:
        return f"This audit could not tell what {audit.adversary.numbered} learns {of}."
    if ran:
        return (
            f"Nothing was measured: {len(ran)} of {len(audit.findings[RUN])} attacks guessed "
            f"something from what {audit.adversary.numbered} observed of {clients} clients, and "
            "without the clients' data nobody knows whether they are right."
        )
    return (
        f"Nothing was tried: none of {len(audit.findings[RUN])} attacks has what it needs in what "
        f"{audit.adversary.numbered} observed of {clients} clients, so this page says neither that "
        "data are safe nor that they are not."
    )


def lines(audit: Audit, guarantee: str) -> list[str]:
    """Return what belongs to the headline, in five lines at most.

    Args:
        audit: the results.
        guarantee: what ε bounds, in a sentence.
    """
    found = {verdict: _found(audit, verdict) for verdict in VERDICTS}
    learned = []
    if found[BROKEN] and found[VISIBLE]:
        learned.append(f"It could also learn {_named(found[VISIBLE])}, which nothing hides.")
    prevented = _prevented(audit)
    if prevented:
        learned.append(
            f"Without the protections of the run, attacks also learn {_named(prevented)}."
        )
    chance = []
    if found[CHANCE]:
        chance.append(f"At chance, with twins that show it: {_named(found[CHANCE])}. {NO_PROOF}")
    held = dict.fromkeys(name for finding in audit.judged(CHANCE) for name in finding.held)
    if held:
        chance.append(f"Held, since the attack succeeds without it alone: {', '.join(held)}.")
    untold = list(_untried(audit))
    if found[UNTOLD]:
        untold.insert(0, f"Could not tell of {_named(found[UNTOLD])}: the table says what would.")
    texts = [[assumption(audit.adversary)], learned, chance, untold, [guarantee]]
    return [" ".join(sentences) for sentences in texts if any(sentences)]


def _found(audit: Audit, verdict: str) -> list[Finding]:
    """Return the findings of one verdict, of which each says what no earlier one says."""
    said: set[str] = set()
    found = []
    for finding, _ in ordered(audit):
        if finding.learns not in said and finding.verdict == verdict != NOT_TRIED:
            found.append(finding)
        said.add(finding.learns) if finding.score is not None else None
    return found


def facts_table(facts: Sequence[tuple[str, str]]) -> str:
    """Return what was audited as a table, whose digests break anywhere.

    Args:
        facts: name and text of each.
    """
    return html.table(("", ""), [(name, (text, html.LONG)) for name, text in facts])


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
        text += (
            f", and the data and keys of {len(adversary.clients)} of the clients, which undo masks "
            "and seals"
        )
    return f"{text}."


def _prevented(audit: Audit) -> list[Finding]:
    """Return the findings that are better than chance on the unprotected twin alone."""
    prevented = []
    learned = set()
    for finding, twin in ordered(audit):  # those that learned on the run come first
        if finding.verdict in (BROKEN, VISIBLE):
            learned.add(finding.learns)
        elif twin.outcome == BETTER and finding.verdict != CHANCE and finding.learns not in learned:
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

"""What the recording of an app of others says: its messages, gaps, and what its noise is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from securecluster.core.number_format import enumerated, printable
from securecluster.privacy.dp import accounting
from securecluster.recordings.recorded_lines import Gap, updaters
from securecluster.recordings.recorded_messages import HIDDEN, NO_REPLY, STEP, TRAIN, action_of
from securecluster.recordings.recording_folder import ALL, Recording

HEADINGS = (
    "message",
    "rounds",
    "exchanges",
    "bytes to clients",
    "bytes from clients",
    "updates in the open",
)
MOST_NAMED = 5  # rounds or gaps that a sentence names


def price(recording: Recording) -> str:
    """Return in a sentence what the declared noise is worth; no text where none is declared.

    Each update is a Gaussian mechanism of sensitivity `clip` for a client that is added or removed.
    A round counts as often as a client sent an update in it, in the open or masked, but once where
    a client that was asked did not answer: its update may have left all the same. A gap counts as
    one more. Nothing is taken off for sampled clients.

    Args:
        recording: of the app.
    """
    facts = recording.facts
    if facts.noise is None:
        return ""
    missing = [name for name in ("clip", "placement", "delta") if getattr(facts, name) is None]
    if missing:
        names = ", ".join(missing)
        return f"The declared noise is unpriced: it takes {names} of TrainingFacts, too."
    if not any(updaters(exchange) for exchange in _training(recording)):
        return "The declared noise is unpriced: no update was recorded."
    counts = _updates_by_round(recording)
    lost = sum(map(_may_be_training, [*recording.gaps, *recording.unfinished]))
    updates = sum(counts.values()) + lost
    assert facts.delta is not None
    cost = accounting.epsilon([(facts.noise, 1.0, updates)], facts.delta)
    against = "the server" if facts.placement == "local" else "others than the server"
    over = counted(len(counts), "round")
    if updates > len(counts) + lost:
        over = f"{updates - lost} updates in {over}"
    if lost:
        over += f" and {counted(lost, 'gap')} of the recording"
    return (
        f"By our accountant the declared noise gives each client ({cost.epsilon:.3g}, "
        f"{facts.delta:g})-differential privacy against {against} over {over}, if the app "
        "clips and adds noise as declared: nothing here checked that."
    )


def sampling(recording: Recording) -> str:
    """Return in a sentence where rounds had fewer or more clients than was declared.

    A strategy that adds noise to the mean of a round divides it by the declared number. With fewer
    clients a single one changes the mean by more than that noise was made for.

    Args:
        recording: of the app.
    """
    facts = recording.facts
    declared = facts.sampled_clients
    if declared is None:
        return ""
    client_counts = _clients_by_round(recording)
    others = {round: count for round, count in client_counts.items() if count != declared}
    if not others:
        return ""
    counts = sorted(set(others.values()))
    few_to_many = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    sentence = (
        f"TrainingFacts declares {counted(declared, 'sampled client')}, and {few_to_many} sent an "
        f"update in {enumerated('round', sorted(others))}."
    )
    fewest = counts[0]
    if fewest > declared or facts.placement != "central" or facts.noise is None:
        return sentence
    noise = facts.noise * fewest / declared
    sentence += (
        f" If the noise is that of a mean over {declared}, it is {noise:.3g} and not "
        f"{facts.noise:g} of the clipping norm where {fewest} sent one"
    )
    if facts.delta is None or not facts.clip:
        return f"{sentence}."
    steps = []
    for round, count in _updates_by_round(recording).items():
        share = min(1.0, client_counts.get(round, declared) / declared)
        steps.append((facts.noise * share, 1.0, count))
    cost = accounting.epsilon(steps, facts.delta)
    return f"{sentence}, and the rounds that were recorded come to ε = {cost.epsilon:.3g}."


def notes(recording: Recording) -> list[str]:
    """Return what is missing, and what of the app's messages no attack could read, in sentences.

    Args:
        recording: of the app.
    """
    return [*_missing(recording), *_unread(recording)]


def messages(recording: Recording) -> list[tuple[str, ...]]:
    """Return a row for each type of message: rounds, exchanges, bytes both ways, updates.

    Args:
        recording: of the app.
    """
    rows: list[tuple[str, ...]] = []
    for message_type in dict.fromkeys(exchange["kind"] for exchange in recording.exchanges):
        chosen = [exchange for exchange in recording.exchanges if exchange["kind"] == message_type]
        rounds = len({exchange["round"] for exchange in chosen})
        pushes = sum(not exchange["late"] for exchange in chosen)
        down = sum(sum(exchange["down"]) for exchange in chosen)
        up = sum(sum(exchange["up"]) for exchange in chosen)
        updates = sum(exchange["updates"] for exchange in chosen)
        rows.append((message_type, str(rounds), str(pushes), f"{down:,}", f"{up:,}", str(updates)))
    return rows


def summary(recording: Recording) -> list[str]:
    """Return what was recorded and declared, in sentences.

    Args:
        recording: of the app.
    """
    facts = ", ".join(f"{name} {value}" for name, value in recording.facts.known.items())
    metrics = set()
    for exchange in recording.exchanges:
        for numbers in exchange["metrics"].values():
            metrics |= set(numbers)
    sentences = [
        f"App: {recording.app}, over Flower, with {len(recording.nodes)} clients.",
        f"Declared of its training: {facts or 'nothing'}.",
    ]
    if metrics:
        named = printable(", ".join(sorted(metrics)))
        sentences.append(f"Each client's own numbers reach the server in the open: {named}.")
    guarantees = [text for text in (price(recording), sampling(recording)) if text]
    return [*sentences, *guarantees, *notes(recording)]


def _training(recording: Recording) -> Iterator[dict[str, Any]]:
    """Yield the exchanges in which clients were asked to train."""
    for exchange in recording.exchanges:
        if action_of(exchange["kind"]) == TRAIN:
            yield exchange


def _updates_by_round(recording: Recording) -> dict[int, int]:
    """Return by round of training how many updates one client may have sent at most."""
    sent: dict[int, Counter[int]] = {}
    silent = set()
    for exchange in _training(recording):
        round = exchange["round"]
        sent.setdefault(round, Counter()).update(updaters(exchange))
        if NO_REPLY in exchange["notes"].values():
            silent.add(round)
    counts = {}
    for round, updates in sent.items():
        maximum = max(updates.values(), default=int(round in silent))
        if maximum:
            counts[round] = maximum
    return counts


def _clients_by_round(recording: Recording) -> dict[int, int]:
    """Return by round of training how many clients sent an update."""
    clients: dict[int, set[int]] = {}
    for exchange in _training(recording):
        senders = updaters(exchange)
        if senders:
            clients.setdefault(exchange["round"], set()).update(senders)
    return {round: len(senders) for round, senders in clients.items()}


def _may_be_training(gap: Gap) -> bool:
    """Return whether clients may have trained in an exchange that is missing."""
    return action_of(gap["kind"]) in (TRAIN, "")


def _missing(recording: Recording) -> list[str]:
    """Return which exchanges are missing, in sentences."""
    sentences = []
    if recording.gaps:
        named = [_gap(gap) for gap in recording.gaps[:MOST_NAMED]]
        more = len(recording.gaps) - len(named)
        if more:
            named.append(f"{more} more")
        sentences.append(
            f"The recording has {counted(len(recording.gaps), 'gap')}, where an exchange was not "
            f"written: {'; '.join(named)}."
        )
    if recording.unfinished:
        sentences.append(
            f"{counted(len(recording.unfinished), 'exchange')} under way when this was read, or "
            "lost when the recorder was killed: each is counted as a gap."
        )
    if recording.is_open:
        sentences.append(
            "The recorder has not ended yet, or was killed: messages after the last exchange may "
            "be missing."
        )
    return sentences


def _gap(gap: Gap) -> str:
    """Return a gap in words."""
    message_type = gap["kind"] or "a message"
    round = f" in round {gap['told']}" if gap["told"] else ""
    return printable(f"{message_type}{round} ({gap['gap']})")


def _unread(recording: Recording) -> list[str]:
    """Return why replies to be trained are not in the transcript, in sentences."""
    counts: Counter[str] = Counter()
    for exchange in _training(recording):
        for number, text in exchange["notes"].items():
            if number != ALL and text != STEP:
                counts[text] += 1
    sentences = []
    for text, count in sorted(counts.items()):
        sentences.append(f"{count} replies to be trained were not read: {text}.")
    if HIDDEN in counts:
        sentences.append(
            "Flower's secure aggregation hid them: whether it keeps what it promises was not "
            "tested. The average of each round is in the open: models of two rounds differ by it."
        )
    return sentences


def counted(count: int, word: str) -> str:
    """Return a number and what it is of: "1 round", "2 rounds".

    Args:
        count: of things.
        word: for one of them.
    """
    return f"{count} {word}" if count == 1 else f"{count} {word}s"

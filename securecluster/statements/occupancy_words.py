"""Sentences on what one client alone moved in sums that hide single replies.

They follow from counts of a simulation (`securecluster.protections.occupancy`). Numbers with noise
are not counted: a coordinate that one client alone moves has noise, too. On many machines nobody
can count, and the sentences say that.
"""

from __future__ import annotations

from collections.abc import Sequence

from securecluster.protections.occupancy import FieldOccupancy

NOT_COUNTED = (
    "no party of this run could count whether others moved the same coordinates, and a simulation "
    "of such clients in one process does"
)

MIXED = (
    "it mixes coordinates, and without it what one client alone moves stands in the sum as it is"
)


def hidden_in(field: str, figures: FieldOccupancy | None, mixed: bool) -> str:
    """Return what a server that reads exact sums of a field did not see of single clients.

    Args:
        field: what of a single client the sums hide.
        figures: of the field; None where nobody counted.
        mixed: True if it was counted under a mask that mixes coordinates.
    """
    if figures is None:
        return f"{field} as a whole: {NOT_COUNTED}"
    if figures.of_one:
        return f"{field} where another client moved the same coordinate"
    if mixed:
        return f"{field}, in any one reply or sum, as long as the mask holds: {MIXED}"
    fewest = "fewer than three clients"
    if figures.of_few:
        fewest = "one client alone"
    return f"{field}, in any one reply or sum: no coordinate was moved by {fewest}"


def read_of_one(name: str, figures: FieldOccupancy, readers: Sequence[str]) -> str:
    """Return how much of a field was one client's own numbers; empty where nothing was.

    Args:
        name: of the field.
        figures: of the field.
        readers: of its sums, and of averages that are made of them.
    """
    if not figures.of_one:
        return ""
    sums = "1 sum" if figures.sums == 1 else f"{figures.sums:,} sums"
    sentence = (
        f"{figures.of_one:,} of {figures.coordinates:,} coordinates of {name}, over {sums}, were "
        "moved by one client alone: they are that client's own numbers"
    )
    if figures.blocks_of_one:
        sentence += (
            f", and {figures.blocks_of_one:,} of {figures.blocks:,} blocks have one member, whose "
            "row they are"
        )
    return f"{sentence} (read by {', '.join(readers)})"


def in_averages(figures: FieldOccupancy | None, mixed: bool) -> str:
    """Return what averages tell whoever receives them of clients that were nearly alone.

    Args:
        figures: of the averaged field; None where nobody counted.
        mixed: True if it was counted under a mask that mixes coordinates, and that clients undo.
    """
    if figures is None:
        return "; a coordinate that one client alone moved is its own number, which nobody counted"
    of_two = figures.of_few - figures.of_one
    sentences = []
    if figures.of_one:
        sentences.append(f"one client alone moved {figures.of_one:,}, which are its own numbers")
    if of_two:
        sentences.append(f"two clients moved {of_two:,}, of which either reads the other's")
    if sentences:
        return f"; of {figures.coordinates:,} coordinates {', and '.join(sentences)}"
    if mixed:
        return "; coordinates that one client alone moved were not counted, as the mask mixes them"
    return ""

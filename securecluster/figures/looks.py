"""How methods look in pictures: one colour a method everywhere, and names in words.

Colours are those of Paul Tol's scheme "muted", which people with any kind of colour-blindness tell
apart; methods beyond nine have them again with another line, and variants of a method have its
colour with another marker and line, so that a figure is readable in grey, too. Baselines, which do
not cluster, are grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from securecluster.core.number_format import printable

BASELINES = ("fedavg", "finetune", "local")
NAMES = {
    "cfl": "CFL",
    "flhc": "FL+HC",
    "ifca": "IFCA",
    "srfca": "SR-FCA",
    "oneshot": "one-shot",
    "nsim": "NSIM",
    "hidden": "hidden",
    "signature": "signature",
    "pacfl": "PACFL",
    "flux": "FLUX",
    "cflgp": "CFL-GP",
    "rdpcfl": "R-DPCFL",
    "clove": "CLoVE",
    "mrmtl": "MR-MTL",
    "local-kmeans": "local k-means",
    "random": "random clusters",
    "fedavg": "FedAvg",
    "finetune": "FedAvg, fine-tuned",
    "local": "local training",
}
# "muted" of Paul Tol, Colour Schemes (SRON/EPS/TN/09-002), in an order of unlike luminance
COLORS = (
    "#332288", "#cc6677", "#117733", "#88ccee", "#882255", "#44aa99", "#aa4499", "#999933",
    "#ddcc77",
)  # fmt: skip
LINES = ("-", "--", "-.", ":")
MARKERS = "osD^vP*X<>"
GREY = "0.5"
# unlike those above where a curve has no markers
GREY_LINES = ((0, (7, 1.5)), (0, (1, 2.5)), (0, (5, 1, 1, 1, 1, 1)))
GREY_MARKERS = "x+12"
UNITS = {"client": "per client", "example": "per example"}


class Look(NamedTuple):
    """Style in which a variant is drawn in all pictures."""

    color: str
    marker: str
    line: Any  # as matplotlib takes it
    width: float
    order: float


def look_of(number: int) -> Look:
    """Return how a cluster, or one of several kinds of marks, is drawn: told apart in grey, too.

    Args:
        number: of the cluster, from 0; nine differ in colour, ten in their markers.
    """
    marker = MARKERS[number % len(MARKERS)]
    return Look(COLORS[number % len(COLORS)], marker, "-", 1.2, 2)


def looks(variants: Sequence[str]) -> dict[str, Look]:
    """Return how each variant is drawn.

    Args:
        variants: their labels, which begin with a protocol's name.
    """
    clustering = [name for name in NAMES if name not in BASELINES]
    styles: dict[str, Look] = {}
    counts: dict[str, int] = {}
    grey = 0
    for label in variants:
        protocol = label.partition(":")[0]
        if protocol in BASELINES:
            line: Any = GREY_LINES[grey % len(GREY_LINES)]
            marker = GREY_MARKERS[grey % len(GREY_MARKERS)]
            styles[label] = Look(GREY, marker, line, 1.2, 1)
            grey += 1
            continue
        if protocol not in clustering:
            clustering.append(protocol)  # of a package elsewhere
        position = clustering.index(protocol)
        # of variants of one method, the next marker and the next line
        again = counts.get(protocol, 0)
        counts[protocol] = again + 1
        marker = MARKERS[(position + again) % len(MARKERS)]
        taken = {look.line for look in styles.values() if look.marker == marker}
        first = position + 2 * again
        lines = [LINES[(first + k) % len(LINES)] for k in range(len(LINES))]
        line = next((line for line in lines if line not in taken), lines[0])
        styles[label] = Look(COLORS[position % len(COLORS)], marker, line, 1.6, 2)
    return styles


def name_of(variant: str) -> str:
    """Return what a variant is called in pictures: its method's name, and its options in words.

    Args:
        variant: as it is typed, such as "cfl:sketch=64".
    """
    protocol, _, options = variant.partition(":")
    words = [NAMES.get(protocol, protocol)]
    for option in filter(None, options.split(",")):
        name, _, value = option.partition("=")
        spaced = name.strip().replace("_", "-").replace("-", " ")
        if option == "signature=gradient":
            words[0] += " with signatures"
        elif spaced == "dp unit":
            words.append(UNITS.get(value, value))
        elif value.lower() in ("true", ""):
            words.append(spaced)
        elif value.lower() == "false":
            words.append(f"no {spaced}")
        else:
            words.append(f"{spaced} {value}")
    return printable(", ".join(words))

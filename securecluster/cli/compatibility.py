"""Which protections each protocol works with, found by asking the protocols themselves.

A cell is a protocol with one value of each option. It is refused if the protocol's own check raises
`UsageError`, so the table cannot differ from what a run does.

Tests run every pair of protections under every fault: lost replies, a kill in each call, replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from securecluster.errors import UsageError
from securecluster.privacy.masking.masks import MASKS
from securecluster.protections.registry import AGGREGATIONS, RELEVANCES
from securecluster.protocols.registry import protocol_class, protocol_names

# clients of the federation that a cell is checked for
CLIENTS = 12
CLIPPED = {"clip": 1.0, "noise": 1.0, "dp_unit": "client"}
# hyper-parameters of each value of each option; the first value is the default
OPTIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "mask": {name: {"mask": name} for name in MASKS},
    "aggregation": {name: {"aggregation": name} for name in AGGREGATIONS},
    "relevance": {name: {"relevance": name} for name in RELEVANCES},
    "noise": {
        "none": {},
        "local": CLIPPED,
        "central": {**CLIPPED, "placement": "central"},
        "distributed": {**CLIPPED, "placement": "distributed"},
        "example": {**CLIPPED, "dp_unit": "example"},
    },
}
# variants whose protections differ from those of the protocol with its defaults
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "cfl --sketch 256": ("cfl", {"sketch": 256}),
    "cfl --signature gradient": ("cfl", {"signature": "gradient"}),
    "srfca --distance l2": ("srfca", {"distance": "l2"}),
}
YES = "yes"
NEVER = "no"
Values = tuple[str, ...]  # one value of each option, in the order of `OPTIONS`
DEFAULT: Values = tuple(next(iter(values)) for values in OPTIONS.values())


@dataclass(frozen=True)
class Refusal:
    """Smallest combination of values that a protocol refuses.

    Args:
        method: name of the protocol, or of a variant.
        values: the values that are not defaults, by option.
        reason: the protocol's sentence.
    """

    method: str
    values: Mapping[str, str]
    reason: str

    @property
    def label(self) -> str:
        """Return the values as text."""
        return ", ".join(f"{option} {value}" for option, value in self.values.items())


def methods() -> list[str]:
    """Return the names of all protocols, each followed by its variants."""
    names = []
    for name in protocol_names():
        names.append(name)
        names += [variant for variant, (base, _) in VARIANTS.items() if base == name]
    return names


def cells() -> Iterator[Values]:
    """Yield every combination of values."""
    yield from product(*OPTIONS.values())


def build(method: str, values: Values) -> Any:
    """Return the protocol of a cell, unchecked.

    Args:
        method: name of the protocol, or of a variant.
        values: one value of each option.
    """
    base, params = VARIANTS.get(method, (method, {}))
    parameters = dict(params)
    for option, value in zip(OPTIONS, values, strict=True):
        parameters.update(OPTIONS[option][value])
    return protocol_class(base)(**parameters)


def refusal(method: str, values: Values) -> str | None:
    """Return why a cell is refused; None where it runs.

    Args:
        method: name of the protocol, or of a variant.
        values: one value of each option.
    """
    try:
        build(method, values).check(CLIENTS)
    except UsageError as error:
        return str(error)
    return None


def refusals(method: str) -> list[Refusal]:
    """Return the smallest combinations that a method refuses, fewest values first.

    A combination is left out if it is refused with fewer values for the same reason.

    Args:
        method: name of the protocol, or of a variant.
    """
    refused: list[Refusal] = []
    for count in range(1, len(OPTIONS) + 1):
        for chosen in combinations(OPTIONS, count):
            for values in _with_values(chosen):
                changed = _changed(values)
                reason = refusal(method, values)
                reasons = {one.reason for one in refused if one.values.items() <= changed.items()}
                if reason is not None and reason not in reasons:
                    refused.append(Refusal(method, changed, reason))
    return refused


def works_with(method: str, option: str, value: str) -> str:
    """Return whether a method works with one value of an option.

    Args:
        method: name of the protocol, or of a variant.
        option: name of the option.
        value: its value.

    Returns:
        "yes", "no", or what else the value needs, such as "with mask none".
    """
    others = [name for name in OPTIONS if name != option]
    for count in range(len(OPTIONS)):
        for chosen in combinations(others, count):
            for values in _with_values(chosen, {option: value}):
                if refusal(method, values) is None:
                    changed = _changed(values)
                    needed = [f"{name} {changed[name]}" for name in chosen]
                    return f"with {', '.join(needed)}" if needed else YES
    return NEVER


def counts() -> tuple[int, int]:
    """Return the numbers of cells that run and that are refused."""
    running = 0
    refused = 0
    for method in methods():
        for values in cells():
            if refusal(method, values) is None:
                running += 1
            else:
                refused += 1
    return running, refused


def grouped_refusals() -> dict[tuple[tuple[str, ...], str], list[str]]:
    """Return the methods that refuse the same combinations for the same reason.

    Returns:
        Names of methods by (combinations as text, reason); the reason does not name the method.
    """
    grouped: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for method in methods():
        labels: dict[str, list[str]] = {}
        for one in refusals(method):
            class_name = type(build(method, DEFAULT)).__name__
            reason = one.reason.replace(f"no reply of {class_name}", "no reply")
            labels.setdefault(reason, []).append(one.label)
        for reason, refused in labels.items():
            grouped.setdefault((tuple(refused), reason), []).append(method)
    return grouped


def show() -> None:
    """Print what works with what, and why the rest does not."""
    from securecluster.reports import terminal

    console = terminal.Console(markup=False)
    for option, values in OPTIONS.items():
        cells = []
        for method in methods():
            cells.append([method, *(works_with(method, option, value) for value in values)])
        console.print(terminal.table(["protocol", *values], cells, option))
    rows = []
    for (labels, reason), names in grouped_refusals().items():
        rows.append((terminal.lines(*labels), ", ".join(names), reason))
    refusals = terminal.table(["refused", "by", "because"], rows, "what is refused")
    refusals.show_lines = True
    console.print(refusals)
    running, refused = counts()
    console.print(
        f"{running:,} of {running + refused:,} combinations of protocol, mask, aggregation, "
        f"relevance and noise run; {refused:,} are refused before anything is sent"
    )


def _with_values(
    chosen: Sequence[str], preset: Mapping[str, str] | None = None
) -> Iterator[Values]:
    """Yield combinations in which the chosen options, and no others, differ from their defaults.

    Args:
        chosen: names of options.
        preset: values of some other options.
    """
    preset = preset or {}
    alternatives = []
    for option, values in OPTIONS.items():
        names = list(values)
        if option in preset:
            alternatives.append([preset[option]])
        elif option in chosen:
            alternatives.append(names[1:])
        else:
            alternatives.append(names[:1])
    yield from product(*alternatives)


def _changed(values: Values) -> dict[str, str]:
    """Return the values that are not defaults, by option."""
    changed = {}
    for option, value, default in zip(OPTIONS, values, DEFAULT, strict=True):
        if value != default:
            changed[option] = value
    return changed

"""JSON from elsewhere: each entry with another value in its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

MISSING = object()  # in the place of a value: the entry is left out


def entries(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every entry; of a list that of the first item."""
    if path:
        yield path
    if isinstance(value, dict):
        for name in value:
            yield from entries(value[name], (*path, name))
    elif isinstance(value, list) and value:
        yield from entries(value[0], (*path, 0))


def forged(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of the content with another value at a path."""
    copy = json.loads(json.dumps(content))
    inner = copy
    for name in path[:-1]:
        inner = inner[name]
    if value is MISSING:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return copy

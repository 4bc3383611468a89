"""Print the oldest version that pyproject.toml declares of each dependency, as pip takes it."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def oldest(extra: str) -> Iterator[str]:
    """Yield "NAME==VERSION" for each dependency.

    Args:
        extra: whose dependencies are printed beside those of the package itself.
    """
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    for requirement in [*project["dependencies"], *project["optional-dependencies"][extra]]:
        match = re.match(r"(?P<name>[\w.-]+)>=(?P<version>[\w.]+)", requirement)
        if match is None:
            raise SystemExit(f"{requirement!r} in pyproject.toml names no oldest version")
        yield f"{match['name']}=={match['version']}"


if __name__ == "__main__":
    print("\n".join(oldest(sys.argv[1])))

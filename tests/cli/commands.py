"""Commands as users type them."""

from __future__ import annotations

from securecluster.cli.main import main


def exit_of(text: str, *arguments: object) -> int:
    """Carry out a command, and return its exit code.

    Args:
        text: its name and first arguments.
        arguments: the others, such as paths.
    """
    return main([*text.split(), *map(str, arguments)])

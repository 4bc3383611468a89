"""The console that everything is printed on, which no text can take over.

Texts come from files, and names from whoever made the data. A control character, such as the one
that begins an escape sequence, is shown as such: it reaches no terminal.
"""

from __future__ import annotations

from typing import Any

import rich.console
from rich.text import Text

from securecluster.runs.number_format import printable


class Console(rich.console.Console):
    """Console on standard output that shows characters that are not printable as escapes.

    Args:
        options: of rich's console.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text of one line as rich prints it: every text and cell comes by here.

        Args:
            text: to be printed.
            options: of rich's method.
        """
        return super().render_str(printable(text), **options)

"""The README's code blocks: `command WORD` prints the shell block that mentions WORD, `blocks` runs
all of Python and of the shell.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def blocks() -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```", README.read_text(), re.M | re.S)


def main(argv: list[str]) -> None:
    """Print one command or run the blocks; Python blocks share their names, as a reader's session
    would.
    """
    if argv[0] == "command":
        (text,) = [text for language, text in blocks() if language == "sh" and argv[1] in text]
        print(text.strip())
        return
    names: dict[str, object] = {}
    for language, text in blocks():
        if language not in ("python", "sh"):  # what a command prints
            continue
        print(f"--- {language}\n{text}", flush=True)
        if language == "python":
            exec(compile(text, "README.md", "exec"), names)
        elif "pip install" in text:
            subprocess.run(
                ["bash", "-euc", text.replace("pip install -e . && ", "")], check=True
            ) if "securecluster" in text else None
        else:
            subprocess.run(["bash", "-euc", text], check=True)


main(sys.argv[1:])

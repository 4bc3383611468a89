"""The code blocks of the documents: `command WORD` prints the README's shell block that mentions
WORD, `blocks` runs those of Python and of the shell in the README and in docs/*.md, and
`blocks PAGE` those of one page. Pages that need Flower, and blocks that import what is optional,
are left out where it is not installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
OF_FLOWER = ("flower.md",)
# by the text of a block that needs it: the package
OPTIONAL = {
    "import jax\n": "jax",
    "utils.tensorboard import": "tensorboard",
    "import mlflow\n": "mlflow",
    "flower-superlink": "flwr",
}
INSTALLED = "pip install -e . && "  # done already where blocks are run


class Block(NamedTuple):
    """A fenced block: its language, and its text."""

    language: str
    text: str


def documents() -> list[Path]:
    """Return the documents whose blocks are run, the README first."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    if find_spec("flwr") is None:
        pages = [page for page in pages if page.name not in OF_FLOWER]
    return [README, *pages]


def blocks(document: Path) -> list[Block]:
    """Return the fenced blocks of a document.

    Those without a language, or in another one than Python or the shell, are left out: they are
    what a command prints, or parts of other files.
    """
    found = re.findall(r"^```(\w+)\n(.*?)^```", document.read_text(), re.M | re.S)
    every_block = [Block(language, text) for language, text in found]
    missing = [text for text, package in OPTIONAL.items() if find_spec(package) is None]
    return [
        block
        for block in every_block
        if block.language in ("python", "sh") and not any(text in block.text for text in missing)
    ]


def session(document: Path) -> ModuleType:
    """Return an empty module for the names of a document's blocks, as a reader's session has them.

    It can be imported, since dataclasses and type hints look up the module of a class.
    """
    module = ModuleType(document.stem.replace("-", "_"))
    sys.modules[module.__name__] = module
    return module


def run_python(document: Path, text: str, module: ModuleType) -> None:
    """Run a block of Python in a session.

    Args:
        document: whose name tracebacks show.
        text: of the block.
        module: the session, with the names of earlier blocks.
    """
    code = compile(text, document.name, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def run_shell(text: str) -> None:
    """Run a block of the shell, unless it installs something else than this project."""
    command = text.replace(INSTALLED, "")
    if "pip install" not in command:
        subprocess.run(["bash", "-euc", command], check=True)


def run_document(document: Path) -> None:
    """Run a document's blocks in order, in a new folder."""
    module = session(document)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for block in blocks(document):
            print(f"--- {document.name}: {block.language}\n{block.text}", flush=True)
            if block.language == "python":
                run_python(document, block.text, module)
            else:
                run_shell(block.text)
        os.chdir(ROOT)


def main(argv: list[str]) -> None:
    """Print one command of the README, or run the blocks of all documents."""
    if argv[0] == "command":
        (text,) = [block.text for block in blocks(README) if argv[1] in block.text]
        print(text.strip())
        return
    chosen = [ROOT / "docs" / name for name in argv[1:]]
    for document in chosen or documents():
        run_document(document)


if __name__ == "__main__":
    main(sys.argv[1:])

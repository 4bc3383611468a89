"""The options of `securecluster audit`, two of whose names are words of Python."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from securecluster.audits.run_audit import BUDGET, SERVER


@dataclass(frozen=True)
class Audit:
    """Attack a finished run and its unprotected twin.

    Each adversary and budget has a page and a table of its own, such as audit-server.html and
    audit-server.json. The exit code is 0, also where attacks succeed; 2 after a mistake; 3 if an
    attack could not be run because it failed; with --strict 4 if a protection is broken, and 5 if
    of a protection that the run claims no attack could tell whether it holds.
    """

    party: str = field(default=SERVER, metadata={"flag": "--as"})
    """whose view: server, authority, wire, client:NAME, or client:#2, the client at position 2,
    counted from 0
    """
    helpers: str | None = field(default=None, metadata={"flag": "--with"})
    """who colludes, as client:3,client:5"""
    budget: float = BUDGET
    """seconds of a processor; attacks that do not fit are named as skipped"""
    attack: tuple[str, ...] = ()
    """attacks by name, or module:Class for others; all where none is given"""
    data: str | None = None
    """module:function that returns the clients' data, to score a recorded app of Flower"""
    model: str | None = None
    """module:Class of the network of a recorded app of Flower"""
    clients: Path | None = None
    """folder of recorded_client, which tells which node has which client's data"""
    bundle: Path | None = None
    """also a ZIP file to hand over, without seeds, keys, clients' files, what attacks saw, and what
    no ε covers
    """
    with_uncovered: bool = False
    """the bundle also holds what no ε covers, such as metrics, clusters that only clients know and
    names of clients, and says so
    """
    out: Path | None = None
    """folder of the page and the table; None is the run folder"""
    traceback: bool = False
    """show the file and line of attacks that fail"""
    strict: bool = False
    """exit with 4 if a protection that the run claims is broken, and with 5 if attacks on one could
    not tell
    """
    quiet: bool = False
    """print nothing but errors"""

"""Folders and files that a user may not read or write are one sentence of every command."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from securecluster import Federation, load
from securecluster.cli.main import main
from securecluster.errors import SecureClusterError
from securecluster.nodes.node import Node
from securecluster.nodes.policy import Policy
from securecluster.privacy.dp.budget import Budget
from securecluster.privacy.masking.identities import Identity, Roster
from securecluster.protocols import FedAvg

NOBODY = 65534
SMALL = ["--clients", "4", "--samples", "20", "--rounds", "1", "--model", "linear", "--quiet"]
RUN = ["run", "fedavg", *SMALL]
READING = ("resume", "replay", "report", "audit")
COMMANDS = [
    [*RUN, "--out", "@"],
    [*RUN, "--out", "@/new"],
    [*RUN, "--out", "@", "--force"],
    [*RUN, "--out", "@/run", "--force"],
    [*RUN, "--data", "@/table.csv", "--client-column", "a", "--label-column", "b"],
    ["compare", "fedavg", "local", *SMALL, "--out", "@"],
    ["compare", "fedavg", "local", *SMALL, "--out", "@/run", "--force"],
    ["sweep", "fedavg", *SMALL, "--clip", "1", "--noise", "0", "--out", "@/run", "--force"],
    *([command, "@"] for command in READING),
    *([command, "@/run"] for command in READING),
    ["report", "open/run", "--html", "--out", "@"],
    ["report", "open/run", "--bundle", "@/run.zip"],
    ["audit", "open/run", "--budget", "1", "--attack", "linkage", "--out", "@/audit"],
    ["plan", "fedavg", "--clients", "4", "--json", "@/plan.json"],
    ["plan", "fedavg", "--clients", "4", "--picture", "@/plan.png"],
    ["check", "fedavg", "--only", "names", "--json", "@/check.json"],
    *(["node", action, folder] for action in ("init", "ledger") for folder in ("@", "@/node")),
    ["node", "serve", "@", "--app", "nothing"],
    ["node", "serve", "@/node", "--app", "nothing"],
    ["flower-init", "@"],
    ["flower-init", "@/project"],
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unreadable") / "run"
    assert main([*RUN, "--out", str(out)]) == 0
    return out


@pytest.fixture
def place(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a run that can be read, and a closed one with a run and a node."""
    for folder in ("open", "closed"):
        (tmp_path / folder).mkdir()
        shutil.copytree(run, tmp_path / folder / "run")
    assert main(["node", "init", str(tmp_path / "closed" / "node")]) == 0
    (tmp_path / "closed" / "table.csv").write_text("a,b,c\n1,2,3\n")
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o777)
    (tmp_path / "closed").chmod(0)
    yield tmp_path / "closed"
    (tmp_path / "closed").chmod(0o700)


def without_rights(action: Callable[[], object], said: Path) -> tuple[int, str]:
    """Return exit code and standard error of what a process does that is not root."""
    said.touch()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.dup2(os.open(said, os.O_WRONLY), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            code = int(str(action() or 0))
        except SecureClusterError as error:
            os.write(2, f"{error}\n".encode())
            code = 2
        except BaseException as error:
            os.write(2, f"Traceback {error!r}\n".encode())
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, said.read_text()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_says_what_it_may_not_use(
    command: list[str], place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # relative: the folders of pytest's own may be closed, too
    arguments = [word.replace("@", place.name) for word in command]

    def action() -> int:
        import sys

        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
        return main(arguments)

    code, said = without_rights(action, place.parent / "said")
    assert code == 2, said
    lines = [line for line in said.splitlines() if not line.startswith("securecluster: note")]
    assert len(lines) == 1 and lines[0].startswith("securecluster: "), said
    assert "Traceback" not in said and "Errno" not in said


FROM_PYTHON: dict[str, Callable[[Path, Any], object]] = {
    "load": lambda folder, fitted: load(folder / "run"),
    "load the folder": lambda folder, fitted: load(folder),
    "save": lambda folder, fitted: fitted.save(folder),
    "save below": lambda folder, fitted: fitted.save(folder / "new"),
    "export": lambda folder, fitted: fitted.export(folder),
    "export below": lambda folder, fitted: fitted.export(folder / "new"),
    "budget": lambda folder, fitted: Budget(folder / "ledger.jsonl", 1.0),
    "identity": lambda folder, fitted: Identity.load(folder / "node" / "identity.key"),
    "new identity": lambda folder, fitted: Identity.generate().save(folder / "key"),
    "roster": lambda folder, fitted: Roster.load(folder / "roster.txt"),
    "policy": lambda folder, fitted: Policy.load(folder / "node" / "policy.toml"),
    "node": lambda folder, fitted: Node(
        FedAvg(model="linear"),
        Federation.simulate("digits", clients=4, samples=20, seed=0).select([0]),
        folder / "node",
        number=0,
    ),
}


@pytest.mark.parametrize("name", FROM_PYTHON)
def test_every_call_says_what_it_may_not_use(name: str, place: Path, run: Path) -> None:
    fitted = load(run)
    folder = Path(place.name)
    code, said = without_rights(lambda: FROM_PYTHON[name](folder, fitted), place.parent / "said")
    assert code == 2 and said.count("\n") == 1 and "Traceback" not in said, said

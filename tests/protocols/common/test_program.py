"""The digest of a protocol's program: what changes it, and what replay says of a changed one."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from securecluster.cli.main import main
from securecluster.core.serialization import pack, unpack
from securecluster.errors import SecureClusterError
from securecluster.parties import derived, program
from securecluster.parties.derived import program_of
from securecluster.protocols import CFL, FedAvg, Settings
from securecluster.protocols.common.averages.averaging import AveragingState
from securecluster.results.fitted_state import FittedSummary
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel

OWN = """
from securecluster.protocols import FedAvg
class Own(FedAvg):
    name = "own"
"""


def digest_of(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the digest of the class `Own` of a module that is imported anew."""
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    for loaded in [known for known in sys.modules if known.split(".")[0] == name.split(".")[0]]:
        del sys.modules[loaded]
    return program_of(importlib.import_module(name).Own())  # type: ignore[no-any-return]


def test_a_module_outside_counts_with_its_own_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "own_digest_module.py"
    module.write_text(OWN)
    before = digest_of(tmp_path, "own_digest_module", monkeypatch)
    assert len(before) == 32
    (tmp_path / "beside.py").write_text("other = 1\n")
    assert digest_of(tmp_path, "own_digest_module", monkeypatch) == before
    module.write_text("import math\n" + OWN)  # where names are from
    assert digest_of(tmp_path, "own_digest_module", monkeypatch) == before
    module.write_text(OWN + "    rounds = 3\n")
    assert digest_of(tmp_path, "own_digest_module", monkeypatch) != before
    moved = tmp_path / "moved_digest_module.py"
    moved.write_text(OWN)
    assert digest_of(tmp_path, "moved_digest_module", monkeypatch) == before


def test_a_package_counts_with_all_its_modules_wherever_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    for place, helper in (("a", "x = 1\n"), ("b", "x = 1\n"), ("c", "x = 2\n")):
        package = tmp_path / place / "own_digest_package"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "method.py").write_text(OWN)
        (package / "helper.py").write_text(helper)
        name = "own_digest_package.method"
        digests.append(digest_of(tmp_path / place, name, monkeypatch))
    assert digests[0] == digests[1] != digests[2]


def test_methods_of_this_project_differ_and_count_with_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = program_of(FedAvg())
    assert before == program_of(FedAvg(rounds=3)) != program_of(CFL())
    monkeypatch.setattr(program.securecluster, "__version__", "0.0.0")
    assert program_of(FedAvg()) != before


def test_a_class_without_a_file_has_no_digest() -> None:
    made = type("Typed", (FedAvg,), {"__module__": "typed_in_a_terminal"})
    assert program_of(made()) == program.UNKNOWN


def diverge(self: FedAvg, net: ServerChannel, run: Run) -> AveragingState:
    """Return other clusters than the method does."""
    state = RUN_SERVER(self, net, run)
    state.labels = [1, *state.labels[1:]]
    return state


def fail(self: FedAvg, net: ServerChannel, run: Run) -> AveragingState:
    """Fail as a program does that reads another record."""
    raise KeyError("epoch")


RUN_SERVER = FedAvg.run_server
CHANGED = "the program has changed since this run, and a replay differs: replay it with the version"
PEEKED = "differs from the recorded one: it used something that no message contained"
EITHER = "either the program has changed since, or the server used something that no message"


@pytest.mark.parametrize(
    ("then", "now", "loop", "sentence"),
    [
        ("a", "b", diverge, CHANGED),
        ("a", "b", fail, CHANGED),
        ("a", "a", diverge, PEEKED),
        ("", "a", diverge, EITHER),
        ("a", "", diverge, EITHER),
    ],
)
def test_replay_tells_a_changed_program_from_a_peeking_server(
    then: str,
    now: str,
    loop: Any,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    options = ["--clients", "4", "--clusters", "2", "--samples", "20", "--model", "linear"]
    monkeypatch.setattr(derived, "program_digest", lambda *classes: then)
    assert main(["run", "fedavg", *options, "--rounds", "1", "--quiet", "--out", str(out)]) == 0
    monkeypatch.setattr(derived, "program_digest", lambda *classes: now)
    # a program that changed, and does the same, replays
    assert main(["replay", str(out)]) == 0
    monkeypatch.setattr(FedAvg, "run_server", loop)
    capsys.readouterr()
    assert main(["replay", str(out)]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert [other for other in (CHANGED, PEEKED, EITHER) if other in said] == [sentence]


def test_a_run_that_is_resumed_by_another_program_keeps_the_first_one_s_digest(
    four_clients: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = FedAvg(rounds=2, epochs=1, model="linear")

    def stop(line: Any) -> None:
        raise SecureClusterError

    monkeypatch.setattr(derived, "program_digest", lambda *classes: "first")
    with pytest.raises(SecureClusterError):
        made.fit(four_clients, Settings(), folder=tmp_path, report=stop)
    monkeypatch.setattr(derived, "program_digest", lambda *classes: "second")
    assert made.fit(four_clients, Settings(), folder=tmp_path).kept_.learned.program == "first"


def test_a_record_without_a_digest_is_read(four_clients: Any) -> None:
    """As those that earlier versions wrote."""
    fitted = FedAvg(rounds=1, epochs=1, model="linear").fit(four_clients)
    learned = fitted.kept_.learned
    assert learned.program == program_of(fitted)
    packed = pack(learned)
    old = packed.replace(f',\\"program\\":\\"{learned.program}\\"'.encode(), b"")
    assert len(old) < len(packed)
    size = int.from_bytes(packed[:8], "little") - (len(packed) - len(old))
    assert json.loads(old[8 : 8 + size])
    assert unpack(size.to_bytes(8, "little") + old[8:], FittedSummary).program == program.UNKNOWN

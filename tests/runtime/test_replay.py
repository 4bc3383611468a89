"""Honesty by replay: in a fresh process without clients, and against a server that peeks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cases import SMALL_FEDERATION

from securecluster import Federation
from securecluster.cli.main import main
from securecluster.errors import ReplayError
from securecluster.protocols import CFL, Settings
from securecluster.protocols.cfl.protocol import CFLState
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel

PEEK: dict[str, list[int]] = {}


class Peeking(CFL):
    """A server that looks up the true clusters behind the network's back."""

    def run_server(self, net: ServerChannel, run: Run) -> CFLState:
        state = super().run_server(net, run)
        state.labels = PEEK.get("truth", state.labels)
        return state


class PeekingEarly(CFL):
    """A server that invites clients by what it peeked."""

    def _invited(self, net: ServerChannel, state: CFLState, t: int) -> list[int]:
        asked = super()._invited(net, state, t)
        return [i for i in asked if PEEK["truth"][i] == 0] if t > 1 and "truth" in PEEK else asked


def test_a_fresh_process_without_clients_replays_a_run(tmp_path: Path, small: Federation) -> None:
    out = tmp_path / "run"
    method = CFL(rounds=5, criterion="absolute", eps1=100, eps2=1e-6, gamma_max=0)
    method.fit(small, Settings(dropout=0.1, transcript="full"), folder=out)
    assert set(CFL.load(out).labels_) != {0}
    code = f"""
import sys, securecluster.data.federation as f
def refuse(*a, **k): raise SystemExit("a client was built")
f.Federation.__post_init__ = refuse
from securecluster.cli.main import main
sys.exit(main(["replay", {str(out)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "bit for bit" in done.stdout


@pytest.mark.parametrize("protocol", [Peeking, PeekingEarly])
def test_a_peeking_server_fails_the_replay(protocol: type[CFL], small: Federation) -> None:
    method = protocol(rounds=3)
    assert small.truth is not None
    PEEK["truth"] = list(small.truth)
    fitted = method.fit(small, Settings(transcript="full"))
    PEEK.clear()
    config = method.config(small, "float32")
    if protocol is PeekingEarly:
        with pytest.raises(ReplayError):
            method.replay(fitted.transcript_, config)
    else:
        assert method.replay(fitted.transcript_, config) != fitted.server_state_


def test_a_changed_transcript_fails_the_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    arguments = [*SMALL_FEDERATION, "--rounds", "3", "--quiet"]
    assert main(["run", "cfl", *arguments, "--out", str(out)]) == 0
    update = sorted((out / "transcript").glob("*.safetensors"))[3]
    data = bytearray(update.read_bytes())
    data[-1] ^= 0x40  # one bit of an exponent in an update
    update.write_bytes(data)
    assert main(["replay", str(out)]) == 2
    assert "differ" in capsys.readouterr().err


def test_a_run_without_contents_cannot_be_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    arguments = [*SMALL_FEDERATION, "--rounds", "1", "--transcript", "sizes", "--quiet"]
    assert main(["run", "fedavg", *arguments, "--out", str(out)]) == 0
    assert main(["replay", str(out)]) == 2
    assert "--transcript full" in capsys.readouterr().err

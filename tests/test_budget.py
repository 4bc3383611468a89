"""The house stays small where it is met: public members, and frames between command and step.

Figures are those that the house has, and may fall; whoever lets one rise says why in the commit.
The words of ARCHITECTURE have their bound in `test_documents.py`.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest

import securecluster
from securecluster import FedAvg, Federation, protocols
from securecluster.app.cli import main
from securecluster.models.fused_layers import Stack
from securecluster.protocols import CFL
from securecluster.protocols.common.base import ClusteringProtocol

FOLDERS = tuple(str(Path(str(package.__file__)).parent) for package in (securecluster, protocols))


def public_members(owner: object) -> list[str]:
    """Return the names that completion offers."""
    return [name for name in dir(owner) if not name.startswith("_")]


def test_what_a_user_gets_has_at_most_40_public_members() -> None:
    federation = Federation.simulate("digits", clients=4, samples=20, seed=0)
    for kind in (FedAvg, CFL):
        fitted = kind(rounds=1, model="linear", epochs=1).fit(federation)
        assert len(public_members(fitted.result_)) <= 40


@pytest.mark.parametrize(("kind", "members"), [(ClusteringProtocol, 30), (FedAvg, 31), (CFL, 44)])
def test_what_an_author_derives_from_does_not_grow(kind: Any, members: int) -> None:
    assert len(public_members(kind)) <= members


def test_few_frames_lie_between_the_command_and_the_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stacks: list[list[str]] = []
    step = Stack.step

    def counting(*arguments: Any) -> None:
        stacks.append([frame.filename for frame in traceback.extract_stack()])
        step(*arguments)

    monkeypatch.setattr(Stack, "step", counting)
    small = ["--rounds", "2", "--clients", "4", "--threads", "1", "--quiet"]
    assert main(["run", "cfl", *small, "--out", str(tmp_path / "run")]) == 0
    own = [name for name in stacks[0] if name.startswith(FOLDERS)]
    assert len(own) <= 20

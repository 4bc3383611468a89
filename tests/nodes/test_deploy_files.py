"""Files of deploy/, read by the programs that they are for, or parsed where those are not here."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from securecluster import Federation
from securecluster.data.facts import agree
from securecluster.errors import OwnerPolicyError
from securecluster.nodes.node import Node
from securecluster.nodes.policy_file import PolicyFile
from securecluster.nodes.proposal import Proposal
from securecluster.protocols import FedAvg

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MOST_EXPOSED = 1.5  # of 10, by systemd's own score
INSTRUCTIONS = {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT", "CMD"}


def stages() -> dict[str, list[tuple[str, str]]]:
    """Instructions of each stage of the Containerfile, by its name."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Containerfile").read_text(), flags=re.M)
    found: dict[str, list[tuple[str, str]]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            name, rest = line.split(maxsplit=1)
            if name == "FROM":
                image, _, stage = rest.split()
                assert image in found or re.search(r":[\w.-]+$", image), image
                found[stage] = list(found.get(image, []))
            found[stage].append((name, rest))
    return found


def test_images_run_as_nobody_in_particular_from_locked_packages() -> None:
    for stage, instructions in stages().items():
        assert {name for name, _ in instructions} <= INSTRUCTIONS
        users = [rest for name, rest in instructions if name == "USER"]
        assert stage == "built" or users[-1:] == ["10001"]
        for name, rest in instructions:
            words = shlex.split(rest)
            if name == "COPY" and not words[0].startswith("--from"):
                assert all((ROOT / word).exists() for word in words[:-1])
            if name == "RUN" and "pip install" in rest:
                assert "--require-hashes" in words or "--no-deps" in words


def test_hospitals_agents_have_no_network_and_their_supernodes_no_folder_of_a_node() -> None:
    yaml = pytest.importorskip("yaml")
    services: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    assert len(services) == 7
    for name, service in services.items():
        assert service["build"]["target"] in stages()
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        mounted = [volume.split(":")[1] for volume in service["volumes"]]
        assert ("/node" in mounted) == name.startswith("agent")
        assert (service.get("network_mode") == "none") == name.startswith("agent")
        if name.startswith("supernode"):
            number = name[-1]
            agent = services[f"agent-{number}"]["volumes"]
            assert f"./hospital-{number}/socket:/socket" in {*agent} & {*service["volumes"]}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_are_valid_and_shut_in(unit: Path, tmp_path: Path) -> None:
    there = tmp_path / unit.name.replace("@", "@one")
    # what they start is not installed here
    there.write_text(re.sub(r"/opt/securecluster/bin/[\w-]+", sys.executable, unit.read_text()))
    verified = subprocess.run(
        ["systemd-analyze", "verify", str(there)], capture_output=True, text=True, check=False
    )
    assert verified.returncode == 0 and unit.name.split("@")[0] not in verified.stderr
    command = ["systemd-analyze", "security", "--offline=true", str(there)]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    exposed = re.search(r"Overall exposure level .*: ([\d.]+)", told)
    assert exposed is not None and float(exposed[1]) <= MOST_EXPOSED


def test_every_dependency_is_locked_within_its_bounds_and_by_hashes() -> None:
    lock = (DEPLOY / "requirements.lock").read_text().replace("\\\n", " ")
    versions = {}
    for line in lock.splitlines():
        pinned, *hashes = line.split()
        name, version = pinned.split("==")
        versions[name] = Version(version)
        assert hashes[-1].startswith("--hash=sha256:")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras["flower"], *extras["metrics"]]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(versions[wanted.name.replace("_", "-")]), text


def test_a_node_takes_the_example_policy_and_refuses_by_it(tmp_path: Path) -> None:
    everyone = Federation.simulate("digits", clients=4, samples=20, seed=0)
    (tmp_path / "policy.toml").write_text((DEPLOY / "policy.toml").read_text() + "roster = false\n")
    policy = PolicyFile(tmp_path / "policy.toml")
    options: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "linear", "clip": 1.0}
    allowed = FedAvg(**options, noise=2.0, aggregation="secagg", cohort_size=0)
    for made in (allowed, FedAvg(**options, noise=0.5, aggregation="secagg", cohort_size=0)):
        node = Node(made, everyone.select([0]), tmp_path / "node", number=0, policy=policy)
        facts = agree([node.facts()] * 4, seed=0, classes=10)
        proposal = Proposal.of(made, facts, "float32", None).packed()
        if made is allowed:
            node.agree(proposal)
        else:
            with pytest.raises(OwnerPolicyError, match="noise multipliers of at least 1"):
                node.agree(proposal)

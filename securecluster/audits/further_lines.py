"""What each further line about a recorded app could unlock: which attacks it lets be scored.

Nothing here lists what an attack needs. Each one is asked whether it applies to a small copy of the
recording, with stand-ins for all that nobody declared, and then without one after the other. What
is declared later may not fit it, such as a training of many steps: "at most" says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from securecluster.attacks.base import TAPS, TRUE_CLUSTERS, Attack
from securecluster.attacks.linkage import LinkedClients
from securecluster.attacks.registry import attack_named, attack_names
from securecluster.audits.recorded_target import RecordedTarget, UnknownNetwork, partitions_of
from securecluster.audits.recording_report import counted
from securecluster.audits.run_audit import SERVER, adversary_of
from securecluster.core.lazy_torch import torch
from securecluster.data.federation import Federation, Shard
from securecluster.messaging.messages import Rows
from securecluster.messaging.transcript import Transcript
from securecluster.models.flat_model import FlatModel
from securecluster.recordings.recording_folder import Recording
from securecluster.recordings.training_facts import TrainingFacts

DATA = "--data module:function"
MODEL = "--model module:Class"
NODES = 'ClientApp(mods=[recorded_client("DIR")]) with the DIR of recorded'
GROUPS = "Federation(truth=...)"
# the training under which most attacks apply: one step over all samples, and noise of the clients
ASSUMED = TrainingFacts(0.1, 1, 10**9, "sgd", 0.0, clip=1.0, noise=1.0, placement="local")
OF_NOISE = ("clip", "noise", "placement")
SIDE = 8  # pixels of the images that a stand-in has where the network convolves
MOST = 8  # rows and columns of an array in the copy


def sentences(target: RecordedTarget, attacks: Sequence[Attack]) -> list[str]:
    """Return which attacks are scored as it is, and which further lines could let more be.

    Args:
        target: the recording, and what is declared of it.
        attacks: that are asked.
    """
    needs: dict[str, frozenset[str]] = {}
    lacking = _lacking(target)
    small = replace(target, recording=_small_copy(target.recording))
    for attack in attacks:
        items = _needed(attack, small, lacking)
        if items is not None:
            needs[attack.name] = items
    told = [f"Scored with what is given: {_listed([name for name in needs if not needs[name]])}."]
    given: set[str] = set()
    while rest := {name: items for name, items in needs.items() if _lines(items) - given}:
        # the fewest lines first, and of these what lets most attacks be scored
        wanted = [_lines(items) - given for items in rest.values()]
        lines = min(wanted, key=lambda lines: (len(lines), -wanted.count(lines), sorted(lines)))
        given |= lines
        names = [name for name, items in rest.items() if _lines(items) <= given]
        facts = {item for name in names for item in needs[name]}
        shown = " and ".join(_shown(line, facts) for line in sorted(lines))
        too = ", too" if len(told) > 1 else ""
        told.append(f"With {shown}{too}, at most {_listed(names)} more.")
    return told


def of_recording(recording: Recording) -> list[str]:
    """Return the sentences about a recording of which nothing but itself is given.

    Args:
        recording: of an app.

    Raises:
        RunFolderError: its arrays are damaged.
    """
    target = RecordedTarget(
        recording,
        recording.facts,
        adversary_of(recording.names, SERVER),
        None,
        partitions_of(recording),
        UnknownNetwork(_dimension(recording)),
    )
    return sentences(target, [attack_named(name) for name in attack_names()])


def _needed(attack: Attack, target: RecordedTarget, lacking: set[str]) -> frozenset[str] | None:
    """Return what must be declared for an attack to be scored; None if nothing lets it.

    Args:
        attack: any.
        target: a small copy of the recording, and what is declared of it.
        lacking: what nobody declared.
    """
    if target.barred(attack) or TAPS in attack.requires or not target.recording.layout:
        return None
    asked = _asked(attack, target, lacking)
    if asked is None:
        return None
    needs = set(lacking & asked)
    for item in sorted(needs):
        if _asked(attack, target, needs - {item}) is not None:
            needs.remove(item)
    if not isinstance(attack.scorer, LinkedClients):
        needs |= lacking & {DATA, NODES}
    if TRUE_CLUSTERS in attack.requires:
        needs |= lacking & {GROUPS}
    return frozenset(needs)


def _lacking(target: RecordedTarget) -> set[str]:
    """Return what nobody declared of an app."""
    facts = asdict(target.facts)
    lacking = {name for name in ASSUMED.known if facts[name] is None}
    federation = target.federation
    if federation is None:
        lacking.add(DATA)
    if not target.tells_nodes:
        lacking.add(NODES)
    if not target.has_model:
        lacking.add(MODEL)
    if federation is None or federation.truth is None:
        lacking.add(GROUPS)
    return lacking


def _asked(attack: Attack, target: RecordedTarget, items: Collection[str]) -> set[str] | None:
    """Return what an attack asks for that may be lacking; None if it does not apply.

    Args:
        attack: that is asked whether it applies.
        target: a small copy of the recording, and what is declared of it.
        items: of which there are stand-ins.
    """
    facts = {name: value for name, value in ASSUMED.known.items() if name in items}
    federation = network = None
    if target.federation is not None or DATA in items:
        federation = _small_data(target)
        if target.has_model or MODEL in items:
            network = _small_network(target)
    assumed = replace(
        target,
        facts=replace(target.facts, **facts),
        federation=federation,
        network=network or UnknownNetwork(_dimension(target.recording)),
    )
    knowledge = assumed.knowledge(attack)
    try:
        if attack.applies(assumed.view(attack), knowledge) is not None:
            return None
    # it may need more than stand-ins have, and then nothing is promised of it
    except Exception:
        return None
    config: Any = knowledge.config
    return {DATA, MODEL, *config.asked}


def _small_copy(recording: Recording) -> Recording:
    """Return a recording of the same calls in memory, with small arrays of random numbers."""
    layout = [[name, [min(size, MOST) for size in shape]] for name, shape in recording.layout]
    if layout and len(layout[-1][1]) == 1:
        layout[-1][1] = list(recording.layout[-1][1])  # a bias of the classes, which data tell, too
    copy = replace(recording, exchanges=[{"layout": layout}], transcript=Transcript("full"))
    dimension = _dimension(copy)
    generator = torch.Generator().manual_seed(0)
    rows: dict[bytes, torch.Tensor] = {}  # by the model that was sent
    for position in range(recording.transcript.count):
        call, response = recording.transcript.content(position)
        models = []
        for k in range(len(call.to)):
            model = hashlib.sha256(call.query.model.row(k).numpy().tobytes()).digest()
            new = torch.randn(dimension, generator=generator)
            models.append(rows.setdefault(model, new))
        deltas = torch.randn(len(response.ids), dimension, generator=generator)
        reply = replace(response.reply, delta=Rows(deltas))
        query = replace(call.query, model=Rows(torch.stack(models)))
        copy.transcript.record(replace(call, query=query), replace(response, reply=reply))
    copy.transcript.names = recording.transcript.names
    return copy


def _small_data(target: RecordedTarget) -> Federation:
    """Return data of one client as the shapes of the network tell them."""
    shapes = [shape for _, shape in target.recording.layout]
    columns = shapes[0][1:2] or shapes[0]
    shape = (*columns, *(SIDE for _ in shapes[0][2:]))
    x = np.zeros((1, *shape), np.float32)
    y = np.zeros(1, np.int64)
    classes = max((2, *shapes[-1]))
    if target.federation is not None:
        classes = target.federation.classes
    return Federation(("client",), (Shard(x, y, x, y),), classes, 0)


def _small_network(target: RecordedTarget) -> FlatModel:
    """Return a network with the copy's parameters, which computes nothing."""
    shapes = [shape for _, shape in target.recording.layout]
    layers = torch.nn.ModuleList()
    while shapes:
        shape = shapes.pop(0)
        if len(shape) == 2 and shapes[:1] == [shape[:1]]:
            shapes.pop(0)
            layers.append(torch.nn.Linear(shape[1], shape[0]))
        else:
            layers.append(torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(shape))]))
    if isinstance(target.network, UnknownNetwork):
        return FlatModel(layers)
    layers.has_gradients = target.network.has_gradients  # type: ignore[assignment]
    return FlatModel(layers, objective=target.network.objective)


def _dimension(recording: Recording) -> int:
    """Return the number of parameters that were sent."""
    return sum(torch.Size(shape).numel() for _, shape in recording.layout)


def _lines(items: Collection[str]) -> set[str]:
    """Return the lines that declare some items: facts of one kind are one line."""
    return {_line(item) for item in items}


def _line(item: str) -> str:
    """Return the line that declares an item."""
    if item in OF_NOISE:
        return "noise"
    return "training" if item in ASSUMED.known else item


def _shown(line: str, items: Collection[str]) -> str:
    """Return a line as it is written down.

    Args:
        line: as `_line` names it.
        items: that are to be declared.
    """
    facts = [name for name in ASSUMED.known if name in items and _line(name) == line]
    if facts:
        return f"TrainingFacts({', '.join(f'{name}=...' for name in facts)})"
    return line


def _listed(names: Sequence[str]) -> str:
    """Return the number of attacks, and their names."""
    count = counted(len(names), "attack")
    return f"{count} ({', '.join(names)})" if names else count

"""Runs whose clients add shares of the noise in secure sums."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import FULL, VARIANTS, exhaustive, node_each, serve, two_clusters, variant

from securecluster import Federation
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.messages import Call
from securecluster.privacy.dp.ledger import Ledger
from securecluster.privacy.dp.skellam_mechanism import SkellamMechanism
from securecluster.protections.secure_sums import server as sum_server
from securecluster.protocols.common.averages.averaging import SumClient
from securecluster.protocols.conformance import (
    Example,
    check_frames,
    check_nodes,
    check_replay,
    check_resume,
    example,
)
from securecluster.runtime.endpoint import GATHER, SUM
from securecluster.runtime.release_policy import ReleasePolicy
from securecluster.statements import privacy_section

CLIP = 0.5
Z = 2.0
ACCEPTED = ("fedavg", "finetune", "random", "nsim", "local", "hidden", "mrmtl", "flux")
WEIGHTED = ("cfl compress",)


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(6, 40)


def make(name: str = "fedavg", **params: Any) -> Any:
    """A variant with noise in shares and few rounds."""
    usual: dict[str, Any] = {
        "rounds": 3,
        "epochs": 1,
        "model": "mlp-32",
        "aggregation": "secagg",
        "cohort_size": 0,  # clients are lost one by one
        "placement": "distributed",
        "dp_unit": "client",
        "clip": CLIP,
        "noise": Z,
    }
    return variant(name, **{**usual, **params})


def lost_in(method: str, *ids: int) -> Callable[[Call], set[int]]:
    def lost(call: Call) -> set[int]:
        return set(ids) if call.method == method else set()

    return lost


@pytest.fixture(scope="module")
def rotated(federation: Federation) -> Example:
    return example(partial(make, mask="rotation"), federation)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The sums that servers decode from now on."""
    found: list[torch.Tensor] = []
    decode = SkellamMechanism.decode

    def noted(*args: Any) -> torch.Tensor:
        total = decode(*args)
        found.append(total.double())
        return total

    monkeypatch.setattr(SkellamMechanism, "decode", noted)
    return found


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("mask", "gone"),
    [
        ("none", ()),
        ("permutation", (1, 5, 7, 8)),
        ("rotation", (1, 5, 7, 8)),
        exhaustive("none", (1, 5, 7, 8)),
        exhaustive("permutation", (2, 3)),
        exhaustive("rotation", ()),
    ],
)
def test_sums_have_the_noise_of_their_survivors_shares(
    mask: str, gone: tuple[int, ...], sums: list[torch.Tensor]
) -> None:
    """Updates of a tiny learning rate are nothing beside the noise: what is left is noise."""
    many = two_clusters(12, 20)
    for seed in range(2):
        seeded = dataclasses.replace(many, seed=seed)
        serve(make(rounds=2, mask=mask, lr=1e-9), seeded, lost_in("contribute", *gone))
    noise = torch.stack(sums) / CLIP
    assert len(noise) == 2 * 2
    # 8 shares are planned of 12 clients
    planned = Z * math.sqrt((12 - len(gone)) / 8)
    assert float(noise.std()) == pytest.approx(1.005 * planned, rel=0.03)
    assert abs(float(noise.mean())) < 5 * planned / math.sqrt(noise.numel())
    # no two rounds, and no two seeds, have noise in common
    correlation = torch.corrcoef(noise) - torch.eye(len(noise))
    assert float(correlation.abs().max()) < 5 / math.sqrt(noise.shape[1])


@pytest.mark.parametrize("method", ["contribute", "reveal_shares"])
def test_sums_of_fewer_survivors_than_shares_stay_masked(method: str) -> None:
    """8 shares are planned; with 5 of them the deviation would be 1.57 in place of 2."""
    many = two_clusters(12, 20)
    served = serve(make(), many, lost_in(method, 0, 1, 2, 3, 4))
    assert not served.state.outbox.posts
    assert served.net.state.ledger.events == []
    assert served.net.state.lost == {i: [1, 2, 3] for i in range(12)}


def test_clients_and_server_both_hold_to_the_planned_shares(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where more shares are planned than unmasking takes, they decide."""
    monkeypatch.setattr(SkellamMechanism, "shares", lambda self, members: members)
    lost = lost_in("contribute", 3)
    served = serve(make(), federation, lost)
    assert not served.state.outbox.posts
    asked = {entry.method for entry in served.transcript.entries}
    assert not asked & {"reveal_pads", "reveal_shares"}
    assert len(serve(make(), federation).net.state.ledger.events) == 3
    # a server that asks all the same
    monkeypatch.setattr(sum_server._GroupSum, "can_finish", True)
    with pytest.raises(PolicyError, match="5 of 6 members survived, and 6 "):
        serve(make(), federation, lost)


def test_the_ledger_has_what_is_in_the_sum(federation: Federation) -> None:
    served = serve(make(), federation, lost_in("contribute", 2))
    events = served.net.state.ledger.events
    assert len(events) == 3
    for event in events:
        assert (event.mechanism, event.noise_multiplier, event.ids) == (
            "skellam",
            Z,
            (0, 1, 3, 4, 5),
        )
        norm, magnitudes = event.sensitivities
        assert Z <= math.sqrt(event.variance) / norm < 1.001 * Z
        assert magnitudes <= norm * norm
    epsilon = served.net.state.ledger.price(1e-5).epsilon
    gaussian = [dataclasses.replace(event, mechanism="gaussian") for event in events]
    least = Ledger(gaussian).price(1e-5).epsilon
    assert least < epsilon < 1.12 * least


def test_each_group_of_a_call_has_an_event_of_its_own() -> None:
    many = two_clusters(12, 20)
    fitted = make("random", k=2, lr=1e-9).fit(many, FULL)
    for event in fitted.ledger_.events:
        assert event.mechanism == "skellam"
        cluster = [i for i in range(12) if fitted.labels_[i] == fitted.labels_[event.ids[0]]]
        assert list(event.ids) == cluster
    by_size = {event.clients: event.variance for event in fitted.ledger_.events}
    assert len(fitted.ledger_.events) == 2 * 3
    # the planned variance is that of z, whatever the number of clients
    assert max(by_size.values()) < 1.001 * min(by_size.values())


@pytest.mark.parametrize("name", ["fedavg", "nsim"])
def test_a_target_is_met(name: str, federation: Federation, nsim_users: None) -> None:
    fitted = make(name, noise=0.0, target_epsilon=20.0).fit(federation)
    epsilon = fitted.ledger_.price(1e-5).epsilon
    if name == "fedavg":
        assert 19.5 < epsilon <= 20.0
    else:
        assert epsilon <= 20.0


@pytest.fixture
def nsim_users(monkeypatch: pytest.MonkeyPatch) -> None:
    from cases import stub_pair_network

    stub_pair_network(monkeypatch)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ACCEPTED)
def test_methods_whose_updates_leave_in_sums_run(
    name: str, federation: Federation, nsim_users: None
) -> None:
    fitted = make(name, rounds=2, mask="permutation").fit(federation, FULL)
    check_frames(fitted)
    mechanisms = {(event.method, event.mechanism) for event in fitted.ledger_.events}
    for method, mechanism in mechanisms:
        if mechanism == "free":  # a model of averages alone, for newcomers
            continue
        release: ReleasePolicy = getattr(fitted.client, method).__release__
        if "delta" in release.through:
            assert release.via == (SUM,)
            assert mechanism == "skellam"
    assert all(event.mechanism != "exact" for event in fitted.ledger_.events)
    if name != "local":
        assert 0 < fitted.ledger_.price(1e-5).epsilon < 100


def test_every_other_method_is_refused_with_the_reply_that_has_no_share(
    federation: Federation,
) -> None:
    refused = 0
    for name in VARIANTS:
        if name.split()[0] in ACCEPTED or name in WEIGHTED:
            continue
        # eigenvectors and sketches have noise of their own
        signatures = ("signature noise", "signature blocks", "signature auto")
        if name in ("oneshot noise", "pacfl noise", *signatures):
            make(name).check(6)
            continue
        with pytest.raises(UsageError, match="placement") as caught:
            make(name).check(6)
        assert "fedavg" in str(caught.value) or "placement local" in str(caught.value)
        refused += 1
    assert refused > 10


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_noise_is_in_shares_by_default_where_that_is_possible(
    name: str, federation: Federation, nsim_users: None
) -> None:
    """The configuration has the value, so that clients' policies and digests see it."""
    given = make(name, placement="distributed")
    try:
        given.check(6)
    except UsageError:
        possible = False
    else:
        possible = True
    made = make(name, placement="auto")
    expected = "distributed" if possible else "local"
    assert made.privacy.placed(made) == expected
    try:
        made.check(6)
    except UsageError:
        return  # secure sums, or noise, do not work with the method
    config = made.config(federation, "float32")
    assert config["placement"] == expected
    # whoever is told the configuration makes the same one
    assert make(name, placement=expected).config(federation, "float32") == config
    assert make(name, placement="local").config(federation, "float32")["placement"] == "local"


def test_noise_is_each_clients_own_by_default_where_shares_are_not_possible() -> None:
    alone: list[dict[str, Any]] = [{"aggregation": "plain"}, {"dp_unit": "example"}, {"noise": 0.0}]
    for params in alone:
        made = make(**{"placement": "auto", **params})
        assert made.privacy.placed(made) == "local"


def test_hidden_clusters_are_found_by_default_where_noise_of_each_client_would_drown_them() -> None:
    """Local noise in a sum of 40 is that of 40 releases, and 27 shares of 40 one and a half."""
    many = two_clusters(40, 20)
    right = {}
    for placement in ("auto", "local"):
        made = make("hidden", k=2, rounds=1, placement=placement, noise=0.0, target_epsilon=20.0)
        right[placement] = made.fit(many, FULL).agreement_["ari"]
    assert right["auto"] > 0.6
    assert right["local"] < 0.4


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"aggregation": "plain"}, "take aggregation secagg"),
        ({"dp_unit": "example"}, "leave the placement local"),
        ({"name": "cfl compress"}, "uniform"),
        ({"placement": "nobody"}, "placement"),
        ({"noise": 1e6}, "does not fit 32 bits"),
    ],
)
def test_options_that_do_not_go_with_shares_are_refused(
    params: dict[str, Any], words: str, federation: Federation
) -> None:
    with pytest.raises(UsageError, match=words):
        made = make(**params)
        made.check(6)
        made.config(federation, "float32")


def test_a_client_sends_no_clipped_row_outside_of_sums(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = serve(make(rounds=1), federation)
    contents = [honest.transcript.content(k)[0] for k in range(len(honest.transcript.entries))]
    (call,) = [call for call in contents if call.method == "contribute"]
    release = SumClient.contribute.__release__  # type: ignore[attr-defined]
    open_release = dataclasses.replace(release, via=(SUM, GATHER))
    monkeypatch.setattr(SumClient.contribute, "__release__", open_release)
    node = node_each(make(rounds=1), federation, dataclasses.replace(FULL, dtype="float64"))[0]
    single = dataclasses.replace(call.select([0]), verb=GATHER, members=(1,), group=())
    with pytest.raises(PolicyError, match="would leave without noise"):
        node.answer(single)


def test_a_replay_and_a_resumed_run_have_the_same_noise(rotated: Example, tmp_path: Path) -> None:
    check_frames(rotated.fitted)
    check_replay(rotated)
    check_resume(rotated, tmp_path / "run")
    assert {event.mechanism for event in rotated.fitted.ledger_.events} == {"skellam"}


def test_nodes_behind_real_frames_add_the_same_noise(federation: Federation) -> None:
    check_nodes(partial(make, mask="permutation"), federation)


def test_the_report_says_who_adds_the_noise_and_what_the_server_sees(rotated: Example) -> None:
    section = privacy_section.section(rotated.fitted.result_)
    placement = section["placement"]
    for words in ("share of the noise", "noised sums only", "no single reply is private"):
        assert words in placement
    assert "honest" in placement
    assert any("collude" in limit for limit in section["not_covered"])
    assert section["accountant"] == "RDP"
    assert section["epsilon_replace"] > section["epsilon"] > 0
    (seen,) = section["server_view"]
    assert "sums of delta" in seen and "share" in seen

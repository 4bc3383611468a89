"""The least number of members of a secure sum: what clients refuse, and servers do not propose."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from cases import serve, two_clusters, variant

from securecluster import Federation
from securecluster.core.client_names import at
from securecluster.errors import PolicyError, SecureClusterWarning, UsageError
from securecluster.messaging.messages import Call
from securecluster.nodes.policy import Policy
from securecluster.nodes.proposal import Proposal, accepted
from securecluster.parties.endpoints import build_client
from securecluster.protocols import FedAvg, RandomClusters
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.runtime.endpoint import SUM, config_hash
from securecluster.runtime.settings import Settings
from securecluster.statements.privacy_section import section
from securecluster.statements.smallest_sums import smallest_sums

CLIENTS = 9
SECURE: dict[str, Any] = {"rounds": 4, "epochs": 1, "model": "linear", "aggregation": "secagg"}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(CLIENTS, 20)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"least_members": 1}, "whole number from 2"),
        ({"least_members": 2.5}, "whole number from 2"),
        ({"least_members": 10}, "from 2 to 9"),
        ({"least_members": 3, "aggregation": "plain"}, "take aggregation secagg"),
        ({"least_members": 9}, "more than the 8 clients"),
        ({"least_members": 4, "cohort_size": 3}, "less than least_members = 4"),
    ],
)
def test_a_least_number_that_cannot_be_is_refused(params: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        FedAvg(**{**SECURE, **params}).fit(two_clusters(8, 20))


def test_two_is_what_every_client_asks_for_and_in_no_configuration(federation: Federation) -> None:
    default = FedAvg(**SECURE).config(federation, "float32")
    assert "least_members" not in default
    assert FedAvg(**SECURE, least_members=3).config(federation, "float32")["least_members"] == 3
    plain = FedAvg(**{**SECURE, "aggregation": "plain"}).config(federation, "float32")
    assert "least_members" not in plain


@pytest.mark.parametrize(("least", "members"), [(2, 1), (3, 2), (3, 3), (5, 4), (5, 5)])
def test_a_client_refuses_a_smaller_sum_that_a_server_names(
    least: int, members: int, federation: Federation
) -> None:
    """A server that lies forms what list it likes, and only the number of members is checked:
    least - 1 clients of its own fill it."""
    made = RandomClusters(**SECURE, k=2, least_members=least)
    config = made.config(federation, "float32")
    endpoint = build_client(made, federation, Settings())
    query = PendingUpdates.start(CLIENTS, fresh=False).message_for([0])
    call = Call(
        config=config_hash(config),
        method="contribute",
        verb=SUM,
        round=1,
        step=1,
        to=(0,),
        query=query,
        members=(members,),
        group=(",".join(str(i) for i in range(members)),),
    )
    with pytest.raises(Exception) as refused:
        endpoint.answer(call)
    # what is long enough goes on to the exchange of keys, which was left out here
    small = isinstance(refused.value, PolicyError) and f"{least} or more" in str(refused.value)
    assert small is (members < least)


@pytest.mark.parametrize("proposed", [2, 3, 5])
def test_no_server_has_a_node_agree_to_another_number(
    proposed: int, federation: Federation
) -> None:
    made = FedAvg(**SECURE, least_members=4)
    offered = Proposal.of(
        FedAvg(**SECURE, least_members=proposed), federation.facts, "float32", None
    )
    own = federation.select([at(1)]).facts_of(0, samples=True, classes=True)
    with pytest.raises(PolicyError, match=r"least_members = .*, and this client's protocol has"):
        accepted(offered, made, own, 1, Policy(roster=False), None)


BY_CLUSTER: dict[str, dict[str, Any]] = {
    "cfl sketch": {"criterion": "absolute", "eps1": 1e30, "eps2": 1e-30, "gamma_max": 0.0},
    "flhc": {"sketch": 64, "threshold": 1e-6},
    "signature": {"k": 4},
    "pacfl": {"k": 4},
    "random": {"k": 4},
}


@pytest.mark.always
@pytest.mark.few(2)
@pytest.mark.parametrize("name", BY_CLUSTER)
def test_servers_propose_no_smaller_sum(name: str, federation: Federation) -> None:
    """Three rounds of four ask half of each cluster, and clients are lost."""
    sizes = []
    for least in (2, 3, 5):
        made = variant(
            name, **{**SECURE, **BY_CLUSTER[name]}, participation=0.5, least_members=least
        )
        served = serve(made, federation, lambda call: {call.round} if call.verb == SUM else set())
        sizes.append(served.net.state.smallest_sums)
        assert min(sizes[-1].values(), default=least) >= least
    # else the rule would have had nothing to do
    assert min(sizes[0].values()) < 5


def test_members_of_small_clusters_train_alone(federation: Federation) -> None:
    made = RandomClusters(**SECURE, k=3, least_members=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureClusterWarning)
        fitted = made.fit(federation)
    assert sorted(fitted.kept_.learned.local) == list(range(CLIENTS))  # three clusters of three
    assert fitted.kept_.learned.network.smallest_sums == {}
    told = section(fitted.result_)["smallest_sums"]
    assert told == {"sentence": "no secure sum was opened", "members": 0, "clients": 0}


@pytest.mark.parametrize(
    ("least", "opened"), [(2, {0: 3, 1: 3, 2: 3}), (4, {})], ids=["dropped", "needed"]
)
def test_dropouts_by_choice_leave_no_fewer_than_asked_for(
    least: int, opened: dict[int, int]
) -> None:
    """Of four members the server drops the only honest one besides the victim."""
    made = FedAvg(**{**SECURE, "rounds": 1}, cohort_size=0, least_members=least)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureClusterWarning)
        served = serve(made, two_clusters(4, 20), lambda call: {3} if call.verb == SUM else set())
    assert served.net.state.smallest_sums == opened


@pytest.mark.parametrize(
    ("size_of", "said"),
    [
        ({0: 5, 3: 2, 4: 2}, "over 2 clients, and 2 clients were in one of so few: each of the "),
        ({0: 5, 3: 2, 4: 2}, "; 6 clients were in no sum"),
        ({0: 3, 1: 3, 2: 3}, "the sum of the other 3 - k, and with k = 2 the last one's summand"),
        ({0: 9}, "over 9 clients, and 1 client was in one"),
    ],
)
def test_what_members_of_the_smallest_sum_read_is_said(size_of: dict[int, int], said: str) -> None:
    assert said in smallest_sums(size_of, CLIENTS)["sentence"]


def test_the_report_derives_it_from_the_sums_of_the_run(federation: Federation) -> None:
    def told(**params: Any) -> Any:
        made = FedAvg(**{**SECURE, **params})
        return section(made.fit(federation).result_).get("smallest_sums")

    assert told(aggregation="plain") is None
    whole = told()
    assert (whole["members"], whole["clients"]) == (CLIENTS, CLIENTS)
    # cohorts of two and three: some are in a sum of two, though the option is the same
    few = told(participation=0.2, rounds=20)
    assert few["members"] == 2 and "each of the two reads the other's" in few["sentence"]
    assert told(participation=0.2, rounds=20, least_members=4)["members"] >= 4


def test_a_clients_smallest_sum_is_that_of_all_rounds(federation: Federation) -> None:
    made = FedAvg(**SECURE, cohort_size=0)
    served = serve(made, federation, lambda call: {8} if call.round == 2 else set())
    assert served.net.state.smallest_sums == {**dict.fromkeys(range(8), 8), 8: 9}


@pytest.mark.parametrize(
    ("dropout", "lost", "clients", "warned"),
    [(0.3, 0.1, 30, True), (0.05, 0.1, 30, False), (0.3, 0.3, 30, False), (0.3, 0.1, 20, False)],
)
def test_more_losses_than_sums_are_planned_for_are_said(
    dropout: float, lost: float, clients: int, warned: bool
) -> None:
    sums = variant("fedavg", aggregation="secagg", lost=lost).sums
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sums.warn_of_losses(dropout, clients)
    assert ["planned for 10% lost members" in str(one.message) for one in caught] == [True] * warned

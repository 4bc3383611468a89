"""Audits of noise by canary samples: losses, Gram matrices, eigenvectors, signatures, DP-SGD.

The exchange is repeated with clients that hold either canary samples or samples without effect, as
a coin decides. They answer the protocol's own calls through their own endpoint, with the
configuration of the run. The component of their frames along the canary's direction is the
statistic of `securecluster.attacks.dp_audit`. The server is active: it relays θ_0 in place of
trained models, or a direction in place of eigenvectors, since a canary shows most there.

- Losses (SR-FCA's matrix, CFL's fallback): a canary's loss is beyond the bound of a sample's loss,
  that of another sample next to zero. The statistic is the mean of a row.
- Gram matrices (one-shot): the canary is a row in direction u. Clients hold other rows there, and
  more in direction w, so that relevance to u, ‖Ãu‖/λ_1, is nearly linear in uᵀÃu.
- Training with DP-SGD (`dp_unit` example): the canary is a sample whose gradient is beyond the clip
  norm. The statistic is a client's first update, along the update of such a client without noise.
- Eigenvectors with noise of their own (one-shot, naive): canaries are eigenvectors that nearly are
  the negative ones, so the whole sensitivity 2√p shows up to the scaling to unit norm. The bound is
  about eigenvectors alone; relevance is exact.
- Signatures of gradients: the canary is a sample beyond the clip norm in direction u, and the other
  sample is −u, so the claim is that of replacing a sample. The statistic is the first release,
  along the same difference without noise; the second one is in directions that follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from securecluster.attacks import dp_audit
from securecluster.attacks.arrays import Array, as_array
from securecluster.attacks.base import Guess, Harm, Knowledge, View
from securecluster.attacks.dp_audit import CanaryAudit, Planted, TwoWorldScorer
from securecluster.attacks.experiments import with_poisoned_data
from securecluster.core.client_names import at
from securecluster.core.lazy_torch import torch
from securecluster.data import Federation
from securecluster.data.federation import Shard
from securecluster.errors import UsageError
from securecluster.messaging.messages import RELAY, Empty, Rows, Shared
from securecluster.messaging.parties import SERVER
from securecluster.messaging.transcript import Parties, Transcript
from securecluster.models.objectives import Classification
from securecluster.parties.deployment import build_network
from securecluster.parties.derived import initial_model
from securecluster.parties.endpoints import build_client
from securecluster.privacy.dp.auditing import directions
from securecluster.privacy.dp.ledger import Ledger
from securecluster.protocols import CFL, SRFCA, OneShot
from securecluster.protocols.cfl.parameter_tree import ParameterTree, choose_fallback_models
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.comparison.gradient_signatures import (
    SignatureRequest,
    SignatureSender,
)
from securecluster.protocols.common.comparison.signature_plan import PLAIN, plan_of
from securecluster.protocols.common.messages import ModelDelta
from securecluster.protocols.common.options.signature_options import by_gradients
from securecluster.protocols.oneshot.client import OneShotClient
from securecluster.protocols.oneshot.server import eigenvectors_of_others
from securecluster.protocols.srfca.server import cross_losses
from securecluster.runtime.server_channel import ServerChannel
from securecluster.runtime.settings import Settings
from securecluster.runtime.transport import InProcess, Recorded

# what hides values without noise: ε does not count on it
OPEN = {
    "mask": "none", "layer_mask": "none", "sealed": False, "aggregation": "plain",
    "relevance": "plain", "relevance_release": None, "placement": "local",
}  # fmt: skip
SCALE = 1e4  # of canaries: their losses are beyond every bound, or nearly zero
CANDIDATES = 64  # directions of which θ_0 is surest about one
BASELINE = 4.0  # rows in direction u, in units of the noise's spectral norm
SPREAD = 3  # rows in direction w for each of those
TILT = 0.01  # angle by which an eigenvector misses the one whose sign turns
LOSS_FIELD = "loss"


def planted_losses(
    protocol: ClusteringProtocol, federation: Federation, settings: Settings
) -> Planted:
    """Return the statistics of canary samples in losses.

    Args:
        protocol: SR-FCA or CFL, with its hyper-parameters.
        federation: the clients; their samples are replaced.
        settings: device and precision.

    Raises:
        UsageError: the protocol releases no losses, or samples have no labels.
    """
    ask = _asked_losses(protocol)
    if ask is None:
        raise UsageError("no losses leave clients in this run")
    method, request = ask
    coins = dp_audit.heads(len(federation))
    opened = _opened(protocol)
    canaries = _loss_canaries(opened, federation, coins)
    net, transcript = _connected(opened, canaries, settings)
    request(net)
    statistics = {}
    for client, row in _replies(transcript, method, LOSS_FIELD).items():
        # a canary moves all losses of a row alike, so their mean lies along its direction
        statistics[client] = float(row.mean())
    return Planted(statistics, coins, _claimed(net))


def _asked_losses(
    protocol: ClusteringProtocol,
) -> tuple[str, Callable[[ServerChannel], object]] | None:
    """Return the client method whose replies are losses, and the server's request; None if none."""
    if isinstance(protocol, SRFCA) and protocol.distance == "loss":
        return "losses", _ask_for_cross_losses
    if isinstance(protocol, CFL) and protocol.fallback > 0:
        return "judge", _ask_for_path_losses
    return None


def _ask_for_cross_losses(net: ServerChannel) -> None:
    """Ask all clients for their losses under as many copies of θ_0."""
    ids = list(net.clients)
    still = torch.zeros(len(ids), net.agreed["dimension"])
    cross_losses(net, ids, still, 1)


def _ask_for_path_losses(net: ServerChannel) -> None:
    """Ask all clients for the losses of a path of two copies of θ_0, as after one split."""
    clients = len(net.clients)
    # a split must have two halves, whatever the clients' data
    half = clients // 2
    first = list(range(half))
    second = list(range(half, clients))
    tree = ParameterTree.start(clients)
    tree.branch(0, (first, second), 1)
    for node in tree.nodes:
        still = torch.zeros(net.agreed["dimension"])
        node.model = ModelDelta(still)
    labels = [int(client >= half) for client in range(clients)]
    pending = PendingUpdates.start(clients, fresh=False)
    choose_fallback_models(net, tree, pending, labels)


def _loss_canaries(
    protocol: ClusteringProtocol, federation: Federation, coins: tuple[bool, ...]
) -> Federation:
    """Return clients with a sample at the bound of a loss, or none; of unit "client", all samples.

    Raises:
        UsageError: samples have no labels.
    """
    if protocol.privacy.dp_unit == "client":
        return _labelled_canaries(protocol, federation, coins, None, several=True)
    if not protocol.training.validation_share(protocol):
        return _labelled_canaries(protocol, federation, coins, None, several=False)
    # which sample is kept aside is drawn, so all are the same, and one is kept
    size = _one_aside(protocol.training.validation_share(protocol))
    return _labelled_canaries(protocol, federation, coins, size, several=True)


def _labelled_canaries(
    protocol: ClusteringProtocol,
    federation: Federation,
    coins: tuple[bool, ...],
    size: int | None,
    several: bool,
) -> Federation:
    """Return clients whose samples have the surest label, and a canary the least likely one.

    Args:
        protocol: of the network.
        federation: the clients.
        coins: who holds canaries.
        size: samples of each client; None leaves the numbers as they are.
        several: whether all of a client's samples are canaries; otherwise the first one is.

    Raises:
        UsageError: samples have no labels.
    """
    if not isinstance(federation.objective, Classification):
        raise UsageError("canaries need samples with labels")
    sample, surest, unlikeliest = _surest_sample(protocol, federation)

    def change(client: int, shard: Shard) -> Shard:
        count = size or len(shard.y)
        x = np.repeat(sample[None], count, axis=0).astype(shard.x.dtype)
        y = np.full(count, surest, dtype=shard.y.dtype)
        if coins[client]:
            # with DP for single examples the worlds may differ in one sample only
            canary_samples = 1
            if several:
                canary_samples = count
            y[:canary_samples] = unlikeliest
        return replace(shard, x=x, y=y)

    return _changed(federation, change)


def _one_aside(share: float) -> int:
    """Return the fewest samples of which a share of them keeps one aside."""
    size = math.ceil(1 / share)
    while math.floor(share * size) < 1:
        size += 1
    return max(size, 2)


def _surest_sample(protocol: ClusteringProtocol, federation: Federation) -> tuple[Array, int, int]:
    """Return a long sample (…), the label that θ_0 is surest of there, and the least likely one."""
    network = initial_model(protocol, federation)
    shape = federation.shape
    draw = np.random.default_rng(dp_audit.SEED)
    normal = draw.standard_normal((CANDIDATES, *shape)).astype(np.float32)
    samples = normal * SCALE
    with torch.no_grad():
        parameters = network.views(network.initial())
        outputs = network.call(parameters, torch.from_numpy(samples))
    logits = as_array(outputs)
    ordered = np.sort(logits, axis=1)
    # the larger the margin, the nearer the loss of the surest label is to 0
    margins = ordered[:, -1] - ordered[:, -2]
    best = int(np.argmax(margins))
    surest = int(logits[best].argmax())
    unlikeliest = int(logits[best].argmin())
    return samples[best], surest, unlikeliest


def planted_rows(
    protocol: ClusteringProtocol, federation: Federation, settings: Settings
) -> Planted:
    """Return what relevance shows of canary rows in noisy Gram matrices.

    Args:
        protocol: one-shot clustering, with its hyper-parameters.
        federation: the clients; their samples are replaced.
        settings: device and precision.

    Raises:
        UsageError: no such matrices, rows of which are single samples.
    """
    if not isinstance(protocol, OneShot) or protocol.mechanism != "gram":
        raise UsageError("no relevance follows from a noisy Gram matrix")
    _check_features(protocol)
    if protocol.dp_unit != "example":
        raise UsageError("a canary row is one sample, and dp_unit protects a whole client")
    opened = _opened(protocol)
    config = opened.config(federation, settings.dtype)
    z = float(config["gram_noise"])
    width = int(config["width"])
    if width < 2:
        raise UsageError("a canary row and the others need two dimensions")
    along, others = _directions(2, width)
    spectral_norm = z * math.sqrt(width)
    # at least two rows, also without noise
    rows = max(2, math.ceil(BASELINE * spectral_norm))
    coins = dp_audit.heads(len(federation))
    numbers = len(federation) * (rows + 1) * (1 + SPREAD) * width
    if numbers > dp_audit.MOST_NUMBERS:
        raise UsageError(f"canary rows would take {numbers} numbers in memory")

    def change(client: int, shard: Shard) -> Shard:
        # the canary is one more row along u, so the two worlds differ in a single sample
        count = rows + int(coins[client])
        rows_along = np.tile(along, (count, 1))
        rows_across = np.tile(others, (SPREAD * rows, 1))
        return _shard_of(shard, np.concatenate([rows_along, rows_across]))

    clients = _changed(federation, change)
    net, transcript = _connected(opened, clients, settings)
    shared = net.gather(OneShotClient.eigen, Empty(), to=net.clients)
    crafted = torch.zeros_like(shared.rows.vectors.values)
    crafted[:, 0] = torch.from_numpy(along)
    query = eigenvectors_of_others(shared.ids, crafted, shared.step, to=shared.ids)
    net.pairs(OneShotClient.relevance, query, to=shared.ids)
    statistics = {}
    for client, row in _replies(transcript, "relevance", "row").items():
        # all others were given the same vector, and the client itself counts as 1
        other = (client + 1) % len(row)
        statistics[client] = float(row[other])
    return Planted(statistics, coins, _claimed(net))


def planted_eigenvectors(
    protocol: ClusteringProtocol, federation: Federation, settings: Settings
) -> Planted:
    """Return what eigenvectors with noise of their own show of clients' other eigenvectors.

    Args:
        protocol: one-shot clustering with the naive mechanism.
        federation: the clients; their samples are replaced.
        settings: device and precision.

    Raises:
        UsageError: another mechanism, or samples of a single number.
    """
    if not isinstance(protocol, OneShot) or protocol.mechanism != "naive":
        raise UsageError("no eigenvectors have noise of their own")
    _check_features(protocol)
    opened = _opened(protocol)
    width = int(np.prod(federation.shape))
    count = min(int(protocol.vectors), width // 2)
    if not count:
        raise UsageError("canary eigenvectors need two dimensions")
    # The largest entry is made positive, so that a little tilt turns the sign of the vector.
    present = _turned(count, width, math.pi / 4 - TILT)
    absent = _turned(count, width, math.pi / 4 + TILT)
    coins = dp_audit.heads(len(federation))
    # different eigenvalues give the eigenvectors their order
    scales = np.arange(count, 0, -1, dtype=np.float32)[:, None]

    def change(client: int, shard: Shard) -> Shard:
        eigenvectors = absent
        if coins[client]:
            eigenvectors = present
        return _shard_of(shard, scales * eigenvectors)

    clients = _changed(federation, change)
    net, transcript = _connected(opened, clients, settings)
    net.gather(OneShotClient.eigen, Empty(), to=net.clients)
    # `absent` comes out with the other sign
    difference = (present + absent).ravel()
    statistics = {}
    for client, vectors in _replies(transcript, "eigen", "vectors").items():
        sent = vectors[:count].ravel()
        statistics[client] = float(sent @ difference)
    return Planted(statistics, coins, _claimed(net))


def planted_signatures(
    protocol: ClusteringProtocol, federation: Federation, settings: Settings
) -> Planted:
    """Return what the first release of signatures shows of canary samples.

    Args:
        protocol: one whose clients send gradient signatures, with its hyper-parameters.
        federation: the clients; their samples are replaced.
        settings: device and precision.

    Raises:
        UsageError: no such signatures, or clients keep samples aside.
    """
    if not by_gradients(protocol):
        raise UsageError("no gradient signatures leave clients in this run")
    if protocol.training.validation_share(protocol):
        raise UsageError("a canary sample may be kept aside, and such samples are in no signature")
    opened = _opened(protocol)
    # which signatures clients send may depend on the noise, and both runs need the same
    resolved = opened.config(federation, settings.dtype)
    opened = opened.set_params(signature_blocks=resolved["signature_kind"])
    bare = _opened(opened).set_params(signature_noise=0.0, noise=0.0, target_epsilon=None)
    coins = dp_audit.heads(len(federation))
    # one number of samples for all, so that all signatures have the same scale
    size = _median_size(federation)
    width = int(np.prod(federation.shape))
    canary = SCALE * _directions(1, width)

    def change(client: int, shard: Shard) -> Shard:
        sample = -canary
        if coins[client]:
            sample = canary
        # with DP for single examples the worlds may differ in one sample only
        canary_samples = 1
        if opened.dp_unit == "client":
            canary_samples = size
        changed = np.repeat(sample, canary_samples, axis=0)
        unchanged = np.zeros((size - canary_samples, width), dtype=np.float32)
        return _shard_of(shard, np.concatenate([changed, unchanged]))

    clients = _changed(federation, change)
    plain, _ = _first_signatures(bare, clients, settings)
    difference = _difference_of_worlds(plain, coins, "signatures")
    rows, claimed = _first_signatures(opened, clients, settings)
    return Planted(_components(rows, difference), coins, claimed)


def _first_signatures(
    protocol: ClusteringProtocol, clients: Federation, settings: Settings
) -> tuple[dict[int, Array], float]:
    """Return all numbers of each client's first release, and its ε for a sample that is replaced.

    Args:
        protocol: whose clients send signatures.
        clients: with or without canaries.
        settings: device and precision.
    """
    net, transcript = _connected(protocol, clients, settings)
    plan = plan_of(net.agreed)
    method: Any = SignatureSender.send_signature
    fields = ["signature"]
    if plan.kind != PLAIN:
        # residuals begin with class blocks, too
        method = SignatureSender.send_class_sums
        fields = ["projections", "shares"]
    # canaries need no centre that the data would be told for
    dtype = getattr(torch, settings.dtype)
    centre = torch.tensor([plan.centre or 0.0], dtype=dtype)
    net.gather(method, SignatureRequest(Shared(centre)), to=net.clients)
    by_field = [_replies(transcript, method.__name__, name) for name in fields]
    rows = {}
    for client in by_field[0]:
        releases = [replies[client].ravel() for replies in by_field]
        rows[client] = np.concatenate(releases)
    price = net.state.ledger.price(dp_audit.DELTA, "replace")
    assert price is not None  # nothing is sampled
    return rows, price.epsilon


def planted_samples(
    protocol: ClusteringProtocol, federation: Federation, settings: Settings
) -> Planted:
    """Return what one round's updates show of canary samples in training with DP-SGD.

    Args:
        protocol: its hyper-parameters.
        federation: the clients; their samples are replaced.
        settings: device and precision; the transcript must be full.

    Raises:
        UsageError: no DP-SGD, samples have no labels, or clients send no updates by themselves.
    """
    if not protocol.privacy.per_example:
        raise UsageError("no noise is in the training: dp_unit is client")
    opened = _opened(protocol).set_params(rounds=1)
    # the same run without noise gives the direction in which the two worlds differ
    bare = _opened(protocol).set_params(rounds=1, noise=0.0, target_epsilon=None)
    coins = dp_audit.heads(len(federation))
    # one number of samples for all, so that all updates have the same scale
    size = _median_size(federation)
    clients = _labelled_canaries(opened, federation, coins, size, several=False)
    width = initial_model(opened, clients).dimension
    plain = _first_updates(bare.fit(clients, settings), width)
    difference = _difference_of_worlds(plain, coins, "updates")
    fitted = opened.fit(clients, settings)
    rows = _first_updates(fitted, width)
    statistics = _components(rows, difference)
    events = [event for event in fitted.ledger_.events if event.mechanism in ("dp-sgd", "free")]
    if not any(event.mechanism == "dp-sgd" for event in events):
        return Planted(statistics, coins, math.inf)
    training = Ledger(events, fitted.ledger_.samples)
    # sampled batches make mixtures of Gaussians
    full_batch = opened.batch_size >= size and not protocol.training.validation_share(protocol)
    return Planted(statistics, coins, training.price(dp_audit.DELTA).epsilon, gaussian=full_batch)


def _difference_of_worlds(rows: dict[int, Array], coins: tuple[bool, ...], quantity: str) -> Array:
    """Return the difference of what clients send without noise, with a canary and without one.

    Noise has no direction, so the statistic of most power lies along the difference of means.

    Args:
        rows: by client.
        coins: who holds canaries.
        quantity: what the rows are, for the error.

    Raises:
        UsageError: clients send none by themselves.
    """
    present = [row for client, row in rows.items() if coins[client]]
    absent = [row for client, row in rows.items() if not coins[client]]
    if not (present and absent):
        raise UsageError(f"clients send no {quantity} by themselves")
    return np.asarray(np.mean(present, axis=0) - np.mean(absent, axis=0))


def _components(rows: dict[int, Array], direction: Array) -> dict[int, float]:
    """Return by client the component of its row along a direction, times the direction's length."""
    return {client: float(row @ direction) for client, row in rows.items()}


def _directions(count: int, width: int) -> Array:
    """Return public orthonormal rows, (count, width)."""
    return directions(count, width, dp_audit.SEED).numpy().astype(np.float32)


def _median_size(federation: Federation) -> int:
    """Return the median of the clients' numbers of samples."""
    sizes = [len(shard.y) for shard in federation.shards]
    return int(np.median(sizes))


def _changed(federation: Federation, change: Callable[[int, Shard], Shard]) -> Federation:
    """Return the same clients with other data, which follow from their number and their data."""
    everybody = map(at, range(len(federation)))
    return with_poisoned_data(federation, everybody, change)


def _claimed(net: ServerChannel) -> float:
    """Return the ε at the audits' δ that the run's ledger claims of all releases so far."""
    return net.state.ledger.price(dp_audit.DELTA).epsilon


def _first_updates(fitted: ClusteringProtocol, width: int) -> dict[int, Array]:
    """Return the first update (width,) that each client sent by itself."""
    transcript = fitted.transcript_
    updates: dict[int, Array] = {}
    for position, entry in enumerate(transcript.entries):
        # local parameter servers send sums
        if entry.verb == RELAY:
            continue
        _, answer = transcript.content(position)
        delta = getattr(answer.reply, "delta", None)
        if not isinstance(delta, Rows) or delta.values.shape[-1] != width:
            continue
        rows = as_array(delta.values)
        for client, row in zip(answer.ids, rows, strict=True):
            updates.setdefault(client, row)
    return updates


def _turned(count: int, width: int, angle: float) -> Array:
    """Return orthonormal rows (cos, −sin) at an angle, each in two coordinates of its own."""
    rows = np.zeros((count, width), dtype=np.float32)
    for k in range(count):
        rows[k, 2 * k] = math.cos(angle)
        rows[k, 2 * k + 1] = -math.sin(angle)
    return rows


def _check_features(protocol: OneShot) -> None:
    """Raise UsageError unless a sample's features are its own numbers."""
    if protocol.features != "identity":
        raise UsageError("canary rows are samples, and this run compares features of samples")


def _shard_of(shard: Shard, rows: Array) -> Shard:
    """Return a client whose samples are some rows (n, D), all of the first class."""
    shape = shard.x.shape[1:]
    x = rows.reshape(len(rows), *shape).astype(shard.x.dtype)
    y = np.zeros(len(rows), dtype=shard.y.dtype)
    return replace(shard, x=x, y=y)


def _opened(protocol: ClusteringProtocol) -> Any:
    """Return a copy of a protocol without masks, seals and secure sums, which ε does not count."""
    params = protocol.get_params()
    plain = {name: value for name, value in OPEN.items() if name in params}
    return type(protocol)(**{**params, **plain})


def _connected(
    protocol: ClusteringProtocol, clients: Federation, settings: Settings
) -> tuple[ServerChannel, Transcript]:
    """Return the server's channel to a protocol's own endpoint, and what passes it."""
    endpoint = build_client(protocol, clients, settings)
    transcript = Transcript("full")
    transport = Recorded(InProcess(endpoint.answer), transcript)
    net = build_network(protocol, transport, protocol.config(clients, settings.dtype))
    # clients refuse calls outside the run's rounds
    net.round = 1
    return net, transcript


def _replies(transcript: Transcript, method: str, field: str) -> dict[int, Array]:
    """Return a field of each client's only reply to a method, as its frame has it."""
    replies: dict[int, Array] = {}
    for position, entry in enumerate(transcript.entries):
        if entry.method != method:
            continue
        _, answer = transcript.content(position)
        rows = as_array(getattr(answer.reply, field).values)
        replies.update(zip(answer.ids, rows, strict=True))
    return replies


class ReleaseAudit(CanaryAudit):
    """Measures how far canary samples move a release, and bounds ε by it.

    Args:
        planted: what the repeated exchange showed; without it there are no canaries.
    """

    source = "Dong, Roth & Su 2022, Gaussian Differential Privacy; auditing: Nasr et al. 2021"
    needs = "an active server, and clients that hold canary samples or samples that show nothing"
    scorer = TwoWorldScorer()

    def __init__(self, planted: Planted | None = None) -> None:
        self.planted = planted

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if self.planted is None:
            return "not applicable: the run has no canaries; an audit of its noise adds them"
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return each client's statistic, larger where its canary shows.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        assert self.planted is not None
        return Guess("canaries", self.planted.statistics)

    @staticmethod
    def repeated(
        protocol: ClusteringProtocol, federation: Federation, settings: Settings
    ) -> Planted:
        """Return what the release shows of canaries.

        Args:
            protocol: its hyper-parameters.
            federation: the clients.
            settings: device and precision.
        """
        raise NotImplementedError

    def planted_in(
        self,
        protocol: ClusteringProtocol,
        federation: Federation,
        settings: Settings,
        parties: Parties = SERVER,
    ) -> Planted:
        """Return what the release shows of canaries to an active server.

        Args:
            protocol: its hyper-parameters.
            federation: the clients.
            settings: device and precision.
            parties: the adversary; the server is active.

        Raises:
            UsageError: the server is not the adversary, or there is no such release.
        """
        chosen = parties if isinstance(parties, (tuple, list, set, frozenset)) else (parties,)
        if not {"server", SERVER} & set(chosen):
            raise UsageError("only a server asks clients for it")
        return self.repeated(protocol, federation, settings)


class LossAudit(ReleaseAudit):
    """Audit of the losses that clients of SR-FCA and CFL send."""

    name = "dp-audit-losses"
    learns = "who is in the losses"
    harm = Harm.MEMBERS
    release = "losses"
    repeated = staticmethod(planted_losses)


class GramAudit(ReleaseAudit):
    """Audit of noisy Gram matrices by canary rows."""

    name = "dp-audit-gram"
    learns = "who is in the Gram matrices"
    harm = Harm.MEMBERS
    release = "Gram matrices"
    repeated = staticmethod(planted_rows)


class EigenvectorAudit(ReleaseAudit):
    """Audit of the naive mechanism's noise on eigenvectors, apart from the exact relevance."""

    name = "dp-audit-eigenvectors"
    learns = "who is in the eigenvectors"
    harm = Harm.MEMBERS
    release = "eigenvectors"
    repeated = staticmethod(planted_eigenvectors)


class SignatureAudit(ReleaseAudit):
    """Audit of the first release of gradient signatures by canary samples."""

    name = "dp-audit-signatures"
    learns = "who is in the signatures"
    harm = Harm.MEMBERS
    release = "signatures"
    repeated = staticmethod(planted_signatures)


class TrainingAudit(ReleaseAudit):
    """Audit of training with DP-SGD by canary samples, in a round of its own."""

    name = "dp-audit-training"
    learns = "which samples were trained on"
    harm = Harm.MEMBERS
    release = "training"
    repeated = staticmethod(planted_samples)

"""The result of a run: labels, models, scores, prices and the record of what was sent.

A fitted protocol has it as `result_`, and shows its members as its own.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from securecluster.core import atomic_files, manifest, summaries
from securecluster.core.atomic_files import MARKER
from securecluster.core.client_names import Client, ClientNames
from securecluster.core.lazy_torch import torch
from securecluster.core.number_format import shown
from securecluster.core.serialization import unpack
from securecluster.errors import SecureClusterWarning, UsageError
from securecluster.messaging.messages import Rows
from securecluster.messaging.transcript import INDEX, Transcript
from securecluster.parties.config import check_kind, classes_of
from securecluster.parties.derived import adds_noise, call_types, model_of, state_class
from securecluster.parties.method import Method
from securecluster.results import predictions
from securecluster.results.fitted_state import SHARED, UNTUNED, FittedState, FittedSummary
from securecluster.results.preparation import (
    RANGES,
    Guest,
    guests_of,
    own_numbers,
    preparation,
    read_guests,
    write_guests,
)

if TYPE_CHECKING:
    from securecluster.data.federation import Federation
    from securecluster.messaging.outcomes import VerbOutcome
    from securecluster.parties.method import Method
    from securecluster.parties.newcomers import NewcomerRecord
    from securecluster.privacy.masking.key_agreement import Secrets
    from securecluster.privacy.masking.masks import MaskInfo
    from securecluster.results.joining import Joined


# also the old name of `join`, which is refused
FOR_AUDITORS = (
    "client_models_", "earlier", "kept_", "mask_info", "method", "of_folder", "predict",
    "server_state_", "state_", "verb_outcomes",
)  # fmt: skip


class FittedRun:
    """What a user gets from a run.

    Args:
        method: the method; later changes of its hyper-parameters have no effect here.
        fitted: the state at the end of the run.
        transcript: the recorded frames; None where there are none.
        folder: of the run; None records nothing outside this process.

    Attributes:
        labels_: each client's cluster, (m,) ints from 0.
        classes_: the labels as they came, in the order of the network's outputs, (classes,): whole
            numbers from 0 where labels were class numbers.
        models_: a `state_dict` per cluster, for `load_state_dict` of the module; `model_of` gives a
            client's own. Under noise it is None for a cluster all of whose clients trained alone:
            their models have no noise and stay with the clients.
        unshared_labels_: the clusters whose entry in `models_` is None.
        client_models_: the clients' models, as rows of a matrix in which equal rows stand once.
        history_: a dict per round.
        ledger_: the releases of the run and its newcomers.
        transcript_: the recorded frames.
        bytes_: totals by direction and message.
        accuracy_: each client's accuracy on its test data, (m,); for text it is called
            perplexity_, for trajectories position_error_, in metres.
        scores_: the same scores for every kind of data.
        metric_: the name of the metric.
        agreement_: scores against the true clusters, where they are known.
        dropped_: the rounds in which clients did not reply, by client.
        refused_: the rounds in which clients refused a request, by client and reason.
        warning_: a sentence if a run went wrong, else None. In ten rounds or more many clients'
            models learned nothing, by their training loss and accuracy beside those of a model that
            ignores its input, or some are worse on test samples than an answer by their training
            targets alone (of text in 30 or more); or in 30 or more a method that looks for clusters
            found as many as it can, or has two whose models do equally well on each other's
            clients; or in any number of rounds it found one cluster, or one for each client, with
            what fell short of which bound. The observer computes it outside the protocol, so ε does
            not cover it; under noise nothing but chance and these answers is read of clients' data
            for it.
        joined_: after `join`, what newcomers released in that call, and its cost.
        network_: the network with its initial weights, as a flat vector.
        state_: the server's final state; its fields are the protocol's.
        server_state_: the same, packed, as `replay` returns it.
        kept_: all that `save` writes.
        seconds_: of the run.
        device_: that it ran on, "cpu" or "cuda".
        folder: of the run; None where the run left none.
        method: the protocol with the hyper-parameters of the run.
    """

    scores_: NDArray[np.float64]
    warning_: str | None = None
    folder: Path | None = None
    transcript_: Transcript
    joined_: Joined
    # names of the scores by the kind of data
    accuracy_: NDArray[np.float64]
    perplexity_: NDArray[np.float64]
    position_error_: NDArray[np.float64]

    def __init__(
        self,
        method: Method,
        fitted: FittedState,
        transcript: Transcript | None = None,
        folder: Path | None = None,
    ) -> None:
        learned = fitted.learned
        self.kept_ = fitted
        self.method = type(method)(**copy.deepcopy(method.get_params()))
        self.labels_ = np.asarray(learned.labels)
        self._client_names = ClientNames(learned.names)
        self._guests: dict[str, Guest] = {}
        self.client_models_ = Rows(fitted.clients.table, tuple(fitted.clients.index))
        self.network_ = model_of(self.method, learned.config)
        self._start = self._module_tensors()
        clusters = max(learned.labels) + 1
        self.models_ = [self._cluster_model(c) for c in range(clusters)]
        self.unshared_labels_ = [c for c, model in enumerate(self.models_) if model is None]
        if fitted.of_server:  # models are the nodes'
            self.unshared_labels_ = []
        self.history_ = learned.history
        self.ledger_ = learned.network.ledger
        self.bytes_ = learned.bytes
        self.dropped_ = dict(sorted(learned.network.lost.items()))
        self.refused_ = dict(sorted(learned.network.refused.items()))
        # a server whose clients are nodes elsewhere has the scores that they tell
        scores = learned.scores or [math.nan] * len(learned.names)
        self.scores_ = np.asarray(scores, dtype=np.float64)
        self.metric_ = self.network_.objective.metric
        self.classes_ = classes_of(learned.config)
        setattr(self, f"{self.metric_}_", self.scores_)
        self.seconds_ = learned.seconds
        self.device_ = learned.device
        self.server_state_ = fitted.server
        self.agreement_ = learned.agreement
        self.state_: Any = unpack(fitted.server, state_class(self.method))
        if transcript is not None:
            self.transcript_ = transcript
        # releases of newcomers are recorded in the folder, and those recorded there count
        self._newcomers_record: NewcomerRecord | None = None
        self.folder = folder
        if folder is not None:
            from securecluster.parties.newcomers import NewcomerRecord

            self._newcomers_record = NewcomerRecord(folder, learned.config["clients"])
            self._newcomers_record.update(self.ledger_)
            self._guests = read_guests(folder)

    def __repr__(self) -> str:
        """Return a summary in one line."""
        return summaries.line(f"{type(self).__name__} of {self.method.name}", self._summary())

    def _repr_html_(self) -> str:
        """Return a summary for notebooks."""
        return summaries.table(f"{type(self).__name__} of {self.method.name}", self._summary())

    def _summary(self) -> dict[str, str]:
        """Return what was found, and what it cost, in words."""
        count = len(set(self.labels_))
        groups = f"{len(self.labels_)} clients in {count} cluster{'s' * (count > 1)}"
        facts = {"clusters": groups, "rounds": f"{len(self.history_)} rounds"}
        if not np.isnan(self.scores_).all():
            unit = self.network_.objective.unit
            score = shown(float(np.nanmean(self.scores_)), self.metric_, unit)
            facts["score"] = f"{self.metric_} {score}"
        if self.agreement_ is not None:
            facts["true clusters"] = f"ARI {self.agreement_['ari']:.2f}"
        facts["sent"] = f"{self.bytes_['up']:,} bytes up, {self.bytes_['down']:,} down"
        facts["privacy"] = f"ε = {self.ledger_.epsilon:.4g}"
        return facts

    @classmethod
    def of_folder(cls, method: Method, folder: Path) -> Self:
        """Return the result of a finished run, or one that `save` wrote.

        Args:
            method: with the hyper-parameters of the run.
            folder: of the result.
        """
        from securecluster.results.saving import read_kept

        kept = read_kept(folder)
        return cls(method, kept, recorded_transcript(method, folder, kept.learned), folder)

    @property
    def earlier(self) -> Any:
        """Return the models and the ledger of another run that this one started from, or None."""
        return self.method.training.start

    def _module_tensors(self) -> dict[str, torch.Tensor]:
        """Return a copy of the weights of a module of the user's own, by name."""
        tensors: dict[str, torch.Tensor] = {}
        module = self.method.model
        if isinstance(module, str):
            return tensors
        for name, value in module.state_dict().items():
            if isinstance(value, torch.Tensor):
                tensors[name] = value.detach().cpu().clone()
        return tensors

    def _cluster_model(self, label: int) -> dict[str, Any] | None:
        """Return the `state_dict` of the model that a cluster's members share.

        It is that before tuning, which each member does alone.

        Returns:
            None in a run with noise where all members trained alone.
        """
        learned = self.kept_.learned
        shared = self.kept_.clients.extra.get(SHARED)
        if shared is not None:
            theta = shared[label]
            state: dict[str, Any] = self.network_.state_dict(theta)
            return state
        if self.kept_.of_server:
            return None
        members = [i for i, cluster in enumerate(learned.labels) if cluster == label]
        # Noise is to cover the results, and models that were trained alone have none.
        if adds_noise(self.method, learned.config):
            members = [i for i in members if i not in learned.local]
        if not members:
            return None
        untuned = self.kept_.clients.extra.get(UNTUNED)
        if untuned is not None:
            before: dict[str, Any] = self.network_.state_dict(untuned[label])
            return before
        theta = self.client_models_.row(members[0])
        if self.network_.local:
            # each client's own layers are for this client alone
            theta, _ = self.network_.parts(theta)
        of_members: dict[str, Any] = self.network_.state_dict(theta)
        return of_members

    def model_of(self, client: Client) -> dict[str, Any]:
        """Return the `state_dict` of a client's model.

        It is for that client: a model that it trained alone has no noise, and no ε covers it. It
        takes prepared samples, as clients train on them; `module_of` takes those that they have.

        Args:
            client: its name, or `at` its position. A number is a name; only where no client is
                called by a number, it is a position. Whoever joined has the model of its cluster.

        Raises:
            UsageError: no such client, or a number that could be a name; or the result of a server,
                whose clients have their models at their nodes.
        """
        self.kept_.check_clients()
        guest = self._guest(client)
        if guest is not None:
            return self._state_of(guest.cluster)
        theta = self.client_models_.row(self._client_names.position(client))
        state: dict[str, Any] = self.network_.state_dict(theta)
        return state

    def _guest(self, client: Client) -> Guest | None:
        """Return a newcomer of a name that no client of the run has."""
        if self._client_names.find(client) is not None:
            return None
        names = list(self._guests)
        called = ClientNames(names).positions_called(client)
        return self._guests[names[called[0]]] if called else None

    def _own(self, client: Client | None) -> Mapping[str, torch.Tensor]:
        """Return what a client or a newcomer keeps of its own data, and what all share."""
        guest = None if client is None else self._guest(client)
        if client is None or guest is not None:
            own = {} if guest is None else guest.numbers
            return {**own_numbers(self.kept_, None), **own}
        return own_numbers(self.kept_, self._client_names.position(client))

    def secrets_of(self, client: Client) -> Secrets:
        """Return the keys and seeds of one client, as it would give them to an adversary.

        They are in `clients.safetensors`, and must stay private. Seeds that all clients share, such
        as a mask's, are among them.

        Args:
            client: as for `model_of`.

        Raises:
            UsageError: as `model_of`.
        """
        self.kept_.check_clients()
        return self.kept_.clients.secrets.of(self._client_names.position(client))

    def to_frame(self, what: str) -> Any:
        """Return a part of the result as an object of pandas.

        Args:
            what: "labels", each client's cluster as a Series by the client's name; or a DataFrame:
                "history", a row for each round; "bytes", a row for each message; "ledger", a row
                for each field that each client released, newcomers included; "scores", a row for
                each client with scikit-learn's scores on its test samples, each followed by that of
                a baseline that knows its training targets alone (`results.scores`): they are the
                observer's, and no ε covers them.

        Raises:
            UsageError: another word, pandas is not installed, or nobody measured scores.
        """
        from securecluster.results.frames import frame_of

        return frame_of(self, what)

    def mask_info(self) -> MaskInfo:
        """Return the description of this run's mask for the result."""
        from securecluster.privacy.masking.masks import describe

        d = self.network_.dimension
        itemsize = self.client_models_.table.element_size()
        pipeline = self.method.pipeline(self.kept_.learned.config)
        # Some masks make rows wider than the model.
        padding = pipeline.width(d) - d
        return replace(describe(self.method.mask, d, itemsize), padding_bytes=padding * itemsize)

    def module_of(
        self, client: Client | None = None, *, cluster: int | None = None
    ) -> torch.nn.Module:
        """Return a torch module with the model of a client, or of a cluster.

        It is a new module of the run's network, or of the class of your own module, on the CPU and
        in evaluation mode. It takes samples as the client has them: where the run scales features,
        the module is `Prepared`, which does so and whose `network` is that of the run; give large
        numbers as doubles. Every method leaves each client one model: with several models it is the
        one that the client chose last (IFCA, CLoVE), or the likeliest where clusters are soft
        (R-DPCFL); CFL's is that of its leaf (`ensemble` averages a path), and fine-tuned or
        personal models are the client's own.

        Args:
            client: as for `model_of`; the model is for this client alone.
            cluster: a label of `labels_`, in place of a client.

        Raises:
            UsageError: no such client or cluster, both or neither, or a cluster whose model is not
                shared, or whose clients scaled features by numbers of their own; or the result of a
                server, whose clients have their models at their nodes.
        """
        if (client is None) == (cluster is None):
            raise UsageError(
                "give a client or a cluster: module_of(client) or module_of(cluster=0)"
            )
        state = self._state_of(cluster) if client is None else self.model_of(client)
        numbers = preparation(self._config, self._own(client))
        return predictions.module_with(
            self.method, self._config, self.network_.objective, state, numbers
        )

    def _state_of(self, cluster: Any) -> dict[str, Any]:
        """Return the `state_dict` of a cluster's model.

        Raises:
            UsageError: no such cluster, or one without a shared model.
        """
        self.kept_.check_clients()
        if cluster not in range(len(self.models_)):
            raise UsageError(
                f"there is no cluster {cluster!r}: the run has 0 to {len(self.models_) - 1}"
            )
        state: dict[str, Any] | None = self.models_[cluster]
        if state is None:
            raise UsageError(
                f"cluster {cluster} shares no model, since its clients trained alone: "
                "module_of(client) gives a client's own"
            )
        return state

    @property
    def _config(self) -> dict[str, Any]:
        """Return what clients and server of the run agreed on."""
        return self.kept_.learned.config

    def _outputs(self, client: Client, x: Any) -> torch.Tensor:
        """Return the outputs (n, …) of a client's model for samples as the user has them."""
        module: Any = self.module_of(client)
        module.seen = None  # of which the samples' reader tells, by the columns' names
        seen = self._own(client).get(RANGES)
        return predictions.outputs_of(module, predictions.read_samples(x, self.kept_, seen))

    def predict_samples(self, client: Client, X: Any) -> NDArray[Any]:  # noqa: N803
        """Return what a client's model (`module_of`) predicts for samples.

        Args:
            client: as for `model_of`.
            X: n samples (n, …): an array, a tensor, or a table, whose columns are found by their
                names, in any order. They need not be the client's own, and are prepared as its own
                were. A SecureClusterWarning tells of values far outside of what it trained on.

        Returns:
            Labels (n,), as in `classes_`; for text the next token at every place (n, L); for
            trajectories positions (n, k), in units of the area.

        Raises:
            UsageError: as `model_of`; or samples of another shape than the run's.
        """
        outputs = self._outputs(client, X)
        return predictions.predicted(outputs, self.classes_, self.network_.objective)

    def predict_proba(self, client: Client, X: Any) -> NDArray[Any]:  # noqa: N803
        """Return the probabilities that a client's model (`module_of`) gives to labels.

        Args:
            client: as for `model_of`.
            X: n samples, as for `predict_samples`.

        Returns:
            (n, classes), in the order of `classes_`; for text (n, L, classes).

        Raises:
            UsageError: as `predict_samples`; or trajectories, whose positions have none.
        """
        outputs = self._outputs(client, X)
        return predictions.probabilities(outputs, self.classes_, self.network_.objective)

    def score(self, client: Client, X: Any, y: Any) -> float:  # noqa: N803
        """Return the metric of a client's model (`module_of`) on samples.

        It is the run's `metric_`: accuracy; for text perplexity, for trajectories the position
        error, both of which are better where they are smaller.

        Args:
            client: as for `model_of`.
            X: n samples, as for `predict_samples`.
            y: their labels, as in `classes_`; tokens (n, L); or positions (n, k). Where X and y
                both have an index, rows belong together by it.

        Raises:
            UsageError: as `predict_samples`; or targets that do not fit the samples.
        """
        targets = predictions.read_targets(str(client), X, y, self.network_.objective)
        return predictions.score_of(
            self._outputs(client, X), targets, self.classes_, self.network_.objective
        )

    def join(self, newcomers: Federation) -> NDArray[np.int64]:
        """Return the clusters of clients that were not in the run, (n,).

        Newcomers join the finished run over its own network, with its masks.

        Every call starts from the end of the run. Releases of newcomers are added to `ledger_`, and
        to the folder of the run if there is one; `joined_` contains the frames, bytes and releases
        of this call. Newcomers then have predictions by the models of their clusters; what they
        keep of their own data is in `newcomers.json` of the folder, which must stay private.
        Clients with one name are one person. A newcomer that is evaluated again with
        the same data sends the same bits, which cost nothing more; with other data it releases
        more. So does a newcomer with the name of a client of the run.

        Args:
            newcomers: n clients and their data, of the same kind as the run's.

        Raises:
            UsageError: no client, or samples of another shape, or classes that the run did not
                have, or, with dp_unit example, fewer training samples than the clients of the run
                where newcomers train.
            RunFolderError: the folder of a run with a finite ε cannot be written to.
        """
        from securecluster.parties.newcomers import warn_of_cost
        from securecluster.results.joining import join

        self.kept_.check_clients()
        check_kind(newcomers)
        if not len(newcomers):
            raise UsageError("there are no newcomers in this federation: give at least one client")
        self.joined_ = join(
            self.method, self.kept_, self.ledger_, self._newcomers_record, newcomers
        )
        if newcomers.feature_names is not None:
            newcomers = newcomers.with_features(self._config["feature_names"])
        guests = guests_of(newcomers, self.joined_.labels)
        for name in self._client_names.names:
            guests.pop(name, None)  # it has a model of its own
        self._guests |= guests
        if self._newcomers_record is not None:
            # a folder that cannot be written to has no releases with noise, either
            with suppress(PermissionError):
                write_guests(self._newcomers_record.path.parent, guests)
        warn_of_cost(self.method, self.ledger_, newcomers.names)
        return np.asarray(self.joined_.labels, dtype=np.int64)

    def predict(self, *_: object, **__: object) -> NoReturn:
        """Refuse the old name of `join`, which other libraries have for predictions on samples.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "a fitted protocol has no predict: call join(newcomers) for the clusters of newcomers, "
            "predict_samples(client, X) for predictions on samples"
        )

    def __dir__(self) -> list[str]:
        """Return the names of attributes, without those that auditors and reports alone read."""
        return [name for name in super().__dir__() if name not in FOR_AUDITORS]

    def save(self, folder: Path | str) -> None:
        """Write the fitted protocol as safetensors.

        `clients.safetensors` contains models and keys, and must stay private. A module of your own
        is saved by its weights, not its code. The transcript is not saved: give `fit` a folder for
        that.

        Args:
            folder: created if it does not exist.

        Raises:
            UsageError: a run folder, or one with releases of newcomers that `ledger_` lacks.
        """
        from securecluster.results.saving import SAVED, save

        target = Path(folder)
        with atomic_files.as_run_folder_error(target, "use"):
            marker = target / MARKER
            is_run = marker.is_file() and atomic_files.read(marker) != SAVED
        if is_run:
            raise UsageError(
                f"{target} is a run folder, whose files belong together: save to another folder"
            )
        save(self, target)

    def export(
        self,
        folder: Path | str,
        *,
        clients: Sequence[Client] = (),
        format: str = "safetensors",
        labels: bool = False,
    ) -> None:
        """Write a model a cluster, for use where this package is not installed.

        Files are `cluster0.safetensors` and so on, `clusters.json` (each client's cluster, class
        and feature names) and `load.py`, which loads a client's model with torch and safetensors
        alone. Frozen parameters are in a file of their own, once, and a cluster's file has what it
        trained. A module of your own is exported by its weights, not its code.

        Whoever gets the folder learns the clusters' models and who is in which cluster, where the
        server knows that: under noise the ε of the run covers both, without noise nothing bounds
        what they tell. Where each client alone knows its cluster (`hidden`, and `ifca` with secure
        sums), no ε covers that, and the folder is without it.

        Args:
            folder: new or empty, or of an earlier export, which is replaced.
            clients: whose own models are written, too; they are for these clients alone. Otherwise
                a client of a method with personal models has its cluster's.
            format: safetensors, or onnx: a graph a model in place of weights and loader, which
                needs onnx and onnxscript, and cannot note values far outside of what the client
                trained on.
            labels: also write each client's cluster where the client alone knows it.

        Raises:
            UsageError: as `model_of`; an unknown format, missing packages, no model that is shared,
                or a folder of something else.
        """
        from securecluster.results.export import LABELS_LEFT_OUT, export

        content = export(self, Path(folder), clients, format, labels)
        if content["clients"] is None:
            warnings.warn(LABELS_LEFT_OUT, SecureClusterWarning, stacklevel=2)

    def verb_outcomes(self) -> list[VerbOutcome]:
        """Return what verbs gave their readers in the run, in order: replies, sums and R.

        They are those that frames do not contain: unmasked secure sums, sums with the noise of a
        trusted server, and who was summed with whom. A replay of `transcript_` computes them again,
        bit for bit.

        Raises:
            UsageError: the transcript has no contents.
            ReplayError: the transcript is not this run's.
        """
        from securecluster.parties.server_half import replayed

        learned = self.kept_.learned
        settings = learned.settings
        outcomes: list[VerbOutcome] = []
        replayed(
            self.method,
            self.transcript_,
            learned.config,
            settings.threads,
            settings.device,
            outcomes.append,
            self.kept_.secrets(),
            self.kept_.key,
            learned.stopped,
        )
        return outcomes


def recorded_transcript(method: Method, folder: Path, summary: FittedSummary) -> Transcript | None:
    """Return the transcript of a run folder, after a check of its index.

    Args:
        method: of the run.
        folder: of a finished run.
        summary: its result.

    Returns:
        None for a folder that `save` wrote.

    Raises:
        RunFolderError: the index differs from what the run wrote.
    """
    marks = manifest.read(folder)
    if "config.json" not in marks:
        return None
    index = f"transcript/{INDEX}"
    # A run without a full transcript has no index.
    if index in marks:
        manifest.checked(folder, index, marks)
    mode = summary.settings.transcript
    return Transcript.read(mode, folder / "transcript", partial(call_types, method), summary.names)

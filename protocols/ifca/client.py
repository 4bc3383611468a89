"""The clients of IFCA, which average several models at once.

Each client chooses the model that fits its own samples best, and sends its choice.

Every client draws the first models of a start from the seed; they are never sent. Only the running
start and the best one so far are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from securecluster.core.lazy_torch import torch
from securecluster.protocols import authoring as fl
from securecluster.protocols.common.averages.model_sets import LowestLoss, first_of_least
from securecluster.protocols.common.client import late_request_error


@dataclass(frozen=True, eq=False)
class ModelAssignment:
    """Server to client: the model to train, which need not be the client's own choice."""

    model: Annotated[fl.Rows, fl.Whole(below="models")]  # (b,) int64
    start: Annotated[int, fl.Between(below="starts")]


class IFCAClient(fl.ModelSetClient):
    """Clients that choose the best of k models (Ghosh et al. 2020, Algorithm 1, lines 5 to 8).

    Args:
        cohort: the clients' data and local training.
        training: local training between two averages.
        pipeline: the stages between a client's update and the wire.
        weighted: whether averages are weighted by |D_i|.

    Attributes:
        hidden: True where a client's choice must not leave it.
    """

    hidden = False

    # start and model of the last choice, and its call; zeros before
    _chosen = fl.ClientTensor(3, dtype="int64")

    @fl.answers(fl.GATHER)
    def choose(self, context: fl.CallContext, query: fl.ModelAverages) -> fl.ModelChoice:
        """Return the model with the lowest loss on all training samples.

        It is the lowest noisy loss where the run adds noise, and the first of equal ones.

        Raises:
            PolicyError: the request is late, and is about a start or averages before the current
                ones; or choices are hidden.
        """
        self._refuse_if_hidden("choose")
        exact = self.mean_losses(context, query)
        losses = self.release_losses(context, exact)
        return self._take(context, query.start, losses)

    @fl.answers(fl.GATHER)
    def join(self, context: fl.CallContext, query: fl.ModelAverages) -> fl.ModelChoice:
        """Return a newcomer's choice among the models of the query (not in the paper).

        Raises:
            PolicyError: the query contains no models, or choices are hidden.
        """
        self._refuse_if_hidden("join")
        return self._choose_offered(context, query)

    def _choose_offered(self, context: fl.CallContext, query: fl.ModelAverages) -> fl.ModelChoice:
        """Store and return a newcomer's choice among the models of the query."""
        losses = self.offered_losses(context, query)
        return self._take(context, query.start, losses)

    @fl.answers(
        fl.GATHER,
        fl.SUM,
        through=("delta",),
        fresh=True,
        trains="usual",
        unmasked=("size",),
        fixed=False,  # an update of the model just chosen
    )
    def contribute(self, context: fl.CallContext, query: fl.Empty) -> fl.Update:
        """Return n_i·Δ_i and n_i, from the model just chosen.

        Clipped updates are not weighted. A cluster of one is allowed, as in the paper.

        Raises:
            PolicyError: a client has not chosen a model, or has gone on since; or choices are
                hidden.
        """
        self._refuse_if_hidden("contribute")
        self._check_chosen(context)
        chosen = []
        for start, model, _ in self._chosen[context.positions].tolist():
            chosen.append((start, model))
        return self.train_chosen(context, chosen)

    @fl.answers(
        fl.GATHER, fl.SUM, through=("delta",), fresh=True, trains="usual", unmasked=("size",)
    )
    def contribute_to(self, context: fl.CallContext, query: ModelAssignment) -> fl.Update:
        """Return n_i·Δ_i and n_i, from the model that the server assigned (RR-Cluster).

        Raises:
            PolicyError: a client has not chosen a model of this start, or has gone on since; or
                choices are hidden.
        """
        self._refuse_if_hidden("contribute_to")
        self._check_chosen(context)
        for start, _, _ in self._chosen[context.positions].tolist():
            if start != query.start:
                raise fl.PolicyError("a client trains models of the start that it has chosen from")
        assigned = [(query.start, model) for model in query.model.values.tolist()]
        return self.train_chosen(context, assigned)

    @fl.answers(fl.SUM, unmasked=("loss", "size"))
    def lowest_loss(self, context: fl.CallContext, query: fl.ModelAverages) -> LowestLoss:
        """Return n_i times the lowest loss, and n_i, by which starts are compared.

        Where updates are clipped, losses are not weighted either.
        """
        lowest = self.mean_losses(context, query).min(1, keepdims=True)
        # The minimum of k means moves by no more than each of them does, so its noise is that of a
        # single mean (not in the paper).
        released = self.release_losses(context, lowest)
        means = context.postprocess(self._told_means, released)
        if self._pipeline.clips:
            return LowestLoss(fl.Rows(means), None)
        sizes = torch.as_tensor([self.cohort.sizes[k] for k in context.positions])
        sums = context.postprocess(lambda released_means: released_means * sizes, means)
        return LowestLoss(fl.Rows(sums), self._sizes(context))

    def _told_means(self, losses: torch.Tensor) -> torch.Tensor:
        """Return the one mean loss of each client, (b,), as a sum can hold it.

        Args:
            losses: (b, 1).
        """
        means = losses[:, 0].clone()
        if self.hidden:  # no sum of fixed-point numbers holds an infinite one
            means = means.clamp(max=fl.LARGEST_LOSS)
        return means

    def _take(self, context: fl.CallContext, start: int, losses: torch.Tensor) -> fl.ModelChoice:
        """Store and return the models of lowest loss.

        Args:
            context: the clients.
            start: the start of the models.
            losses: (b, k) as released, or of choices that stay at their clients.
        """
        best = context.postprocess(partial(self._best_models, context, start), losses)
        chosen = self._chosen[context.positions].tolist()
        for n, model in enumerate(best.tolist()):
            # a late request does not replace a later choice
            _, _, last_choice = chosen[n]
            if context.step >= last_choice:
                chosen[n] = [start, model, context.step]
        self._chosen[context.positions] = chosen
        return fl.ModelChoice(fl.Rows(best))

    def _best_models(
        self, context: fl.CallContext, start: int, losses: torch.Tensor
    ) -> torch.Tensor:
        """Return the model of lowest loss of each client, (b,).

        Args:
            context: the clients.
            start: the start of the models.
            losses: (b, k).
        """
        return first_of_least(losses)

    def _refuse_if_hidden(self, name: str) -> None:
        """Raise PolicyError where the reply would tell a client's choice, and choices are hidden.

        Args:
            name: the client method that was called.
        """
        if self.hidden:
            raise fl.PolicyError(
                f"{name} would tell a client's choice, and this run hides choices: the request is "
                "refused"
            )

    def _check_chosen(self, context: fl.CallContext) -> None:
        """Raise PolicyError for clients that have not chosen, or have gone on since.

        The server asks for the model that they chose in this round.
        """
        chosen = self._chosen[context.positions].tolist()
        for start, _, last_choice in chosen:
            if not last_choice or start not in self.model_sets:
                raise fl.PolicyError(
                    "choose comes first: a client contributes to the model that it has chosen"
                )
        last = self._last_call[context.positions].tolist()
        late = []
        for i, (last_averages, _), (_, _, last_choice) in zip(
            context.ids, last, chosen, strict=True
        ):
            if context.step < max(last_averages, last_choice):
                late.append(i)
        if late:
            raise late_request_error(late)
        self.bind_models(context, [start for start, _, _ in chosen])


def server_view(noisy: bool, clipped: bool, starts: int) -> list[str]:
    """Return what the server sees of clients under every mask, one phrase each.

    Args:
        noisy: whether the run adds noise.
        clipped: whether updates are clipped, and thus not weighted.
        starts: number of starts; the losses of several are compared.
    """
    noise = "with noise, " if noisy else ""
    chosen = "the model each client takes, in every round"
    if noisy:
        chosen += ", which is the best by losses with noise"
    update = "update (the plain sum reads all replies; a cluster of one shows one)"
    if clipped:
        update = f"{noise}each client's clipped {update}"
    else:
        update = f"{noise}each client's number of samples and weighted {update}"
    views = [chosen, update]
    if starts > 1:
        loss = "lowest training loss in each start (the plain sum reads all replies)"
        views.append(f"{noise}each client's {loss}")
    views.append("at the end how far each model has moved (masked where updates are)")
    return views


def hidden_view(k: int, weights: bool, minimum: int) -> list[str]:
    """Return what the server sees of clients where choices are hidden, one phrase each.

    Args:
        k: number of models.
        weights: whether clients send their numbers of samples to sums by model.
        minimum: number of clients whose updates are averaged.
    """
    views = []
    if weights:
        views.append(
            "exact sums of numbers of samples by model (exact_weights), over the clients of a sum"
        )
    return [
        *views,
        "how many of a sum's clients chose each model, exactly, in every round and at the end: no "
        "reply and no single count tells whose choice is which, and what all counts together tell "
        "is said under sums over rounds; the labels of the results are the clients' own",
        "by the difference of two such counts, what a client chose that is in one of them only, "
        "where all others keep their choice",
        f"the sum of updates of each of the {k} models over {minimum} clients or more "
        "(least_choosers), exactly those that were counted; of a model that fewer chose it reads "
        "zeros, and these clients train alone",
        f"with a block of {minimum} clients, {minimum - 1} of them can subtract their own updates "
        "from the average",
        "a count tells that a model was chosen by a single client, and not by which; clients are "
        "told whether each model is averaged, and no count",
        "a server that reports false counts to clients, or names other survivors to each of them, "
        "could read a block of one client: clients check that it does not contradict itself, and "
        "cannot check who else chose their model; who refuses tells nothing of what it chose",
        "nor is a count proof against a changed client that adds more than a one",
        "at the end how far each model has moved (masked where updates are)",
    ]

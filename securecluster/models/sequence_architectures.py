"""The networks for sequences: tokens of text and positions of a trajectory. Dropout layers are
replaced by seeded ones (`models.prepare_module`).
"""

from __future__ import annotations

import torch
from torch import nn

from securecluster.errors import UsageError
from securecluster.models.recurrent import LSTM

Shape = tuple[int, ...]
MIDDLE, SPREAD = 0.5, 12**-0.5  # of a position that is uniform in the area


class LanguageLSTM(nn.Module):
    """The next token at every place: x (n, L) int64 -> logits (n, L, V); two LSTM layers over
    learned embeddings.

    Args:
        tokens: V. embedding: its width. cells: of each layer. dropout: before each layer but the
            first, and before the last Linear.
    """

    # a client's products fill a core: batching gains nothing (benchmarks.recurrent)
    alone_on_cpu = True

    def __init__(self, tokens: int, embedding: int, cells: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, embedding)
        self.lstm1, self.lstm2 = LSTM(embedding, cells), LSTM(cells, cells)
        self.dropout1, self.dropout2, self.dropout3 = (
            nn.Dropout(dropout),
            nn.Dropout(dropout),
            nn.Dropout(dropout),
        )
        self.out = nn.Linear(cells, tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits (n, L, V) of the token after each of x (n, L)."""
        h = self.lstm1(self.dropout1(self.embedding(x)))
        h = self.dropout3(self.lstm2(self.dropout2(h)))
        # of (n, L, H) vmap makes n products of each client's
        found: torch.Tensor = self.out(h.flatten(0, 1)).unflatten(0, x.shape)
        return found


class TrajectoryLSTM(nn.Module):
    """The next position: x (n, T, k) -> (n, k), in units of the area (Pacheco et al. 2021).

    Its last hidden layer is `hidden3`, its last layer `out`: clients of NSIM send one of these.
    Ours: positions are counted from the middle of the area in standard deviations of a uniform one,
    and hidden layers start as He et al. 2015 have them, biases at 0, so that layers can tell how
    far a user's positions spread.

    Args:
        coordinates: k. cells: of the LSTM, of which the last step's output goes on. width: of the
            three hidden layers.
    """

    def __init__(
        self, coordinates: int, outputs: int, cells: int = 4, width: int = 20, dropout: float = 0.2
    ) -> None:
        super().__init__()
        self.lstm = LSTM(coordinates, cells)
        self.hidden1, self.hidden2, self.hidden3 = (
            nn.Linear(cells, width),
            nn.Linear(width, width),
            nn.Linear(width, width),
        )
        self.activation = nn.LeakyReLU()
        self.dropout1, self.dropout2, self.dropout3 = (
            nn.Dropout(dropout),
            nn.Dropout(dropout),
            nn.Dropout(dropout),
        )
        self.out = nn.Linear(width, outputs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The dense layers' weights and biases."""
        for hidden in (self.hidden1, self.hidden2, self.hidden3):
            nn.init.kaiming_uniform_(hidden.weight, nonlinearity="relu")
        for layer in (self.hidden1, self.hidden2, self.hidden3, self.out):
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The position (n, k) after the T of x (n, T, k)."""
        h = self.lstm((x - MIDDLE) / SPREAD)[:, -1]
        for dropout, hidden in (
            (self.dropout1, self.hidden1),
            (self.dropout2, self.hidden2),
            (self.dropout3, self.hidden3),
        ):
            h = dropout(self.activation(hidden(h)))
        found: torch.Tensor = MIDDLE + self.out(h)
        return found


def lstm_words(shape: Shape, classes: int) -> nn.Module:
    """Two LSTM layers of 64 cells on embeddings of 64, dropout 0.2: 324,560 parameters for 2,000
    words.

    Sattler et al. 2019, VI-D, train "a two-layer LSTM network" on AG-News without printing its
    widths: these are ours.
    """
    _tokens("lstm-words", shape)
    return LanguageLSTM(classes, 64, 64, dropout=0.2)


def lstm_chars(shape: Shape, classes: int, cells: int = 96) -> nn.Module:
    """Two LSTM layers on embeddings of 8, as McMahan et al. 2017 and LEAF with 256 cells; 96 cells
    train on a CPU.
    """
    _tokens("lstm-chars", shape)
    return LanguageLSTM(classes, 8, cells)


def lstm_chars_256(shape: Shape, classes: int) -> nn.Module:
    """As `lstm_chars`, with the papers' 256 cells."""
    return lstm_chars(shape, classes, cells=256)


def lstm_trajectory(shape: Shape, classes: int) -> nn.Module:
    """An LSTM of 4 cells, three Linear layers of 20 with leaky ReLU and dropout 0.2, and the
    coordinates (Pacheco et al. 2021, IV).
    """
    if len(shape) != 2 or not min(shape):
        raise UsageError(
            "the model lstm-trajectory takes positions of shape (T, k), not samples of shape "
            f"{_printed(shape)}"
        )
    return TrajectoryLSTM(shape[1], classes)


def _tokens(name: str, shape: Shape) -> None:
    if len(shape) != 1 or not shape[0]:
        raise UsageError(
            f"the model {name} takes tokens of shape (L,), not samples of shape {_printed(shape)}"
        )


def _printed(shape: Shape) -> str:
    return "×".join(map(str, shape)) or "()"

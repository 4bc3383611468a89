"""Network architectures for sequences: tokens of text and positions of a trajectory.

Dropout layers are replaced by seeded ones (`models.prepare_module`).
"""

from __future__ import annotations

import torch
from torch import nn

from securecluster.errors import UsageError
from securecluster.models.recurrent import LSTM

Shape = tuple[int, ...]
# mean and standard deviation of a position that is uniform in the area
MIDDLE = 0.5
SPREAD = 12**-0.5


class LanguageLSTM(nn.Module):
    """A language model of two LSTM layers over learned embeddings: x (n, L) int64 -> (n, L, V).

    Args:
        tokens: V, the number of tokens.
        embedding: width of the embeddings.
        cells: cells of each LSTM layer.
        dropout: dropout before each layer but the first, and before the last Linear.
    """

    # a client's products fill a core: batching gains nothing (benchmarks.costs.recurrent)
    alone_on_cpu = True

    def __init__(self, tokens: int, embedding: int, cells: int, dropout: float = 0.0) -> None:
        super().__init__()
        # The order of layers is that in which their weights are drawn.
        self.embedding = nn.Embedding(tokens, embedding)
        self.lstm1 = LSTM(embedding, cells)
        self.lstm2 = LSTM(cells, cells)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)
        self.dropout3 = nn.Dropout(dropout)
        self.out = nn.Linear(cells, tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits (n, L, V) of the next token at each position.

        Args:
            x: tokens, (n, L) int64.
        """
        embedded = self.dropout1(self.embedding(x))
        h = self.dropout2(self.lstm1(embedded))
        h = self.dropout3(self.lstm2(h))
        # Flattened, since vmap would make n products a client of (n, L, H).
        rows = h.flatten(0, 1)
        logits: torch.Tensor = self.out(rows).unflatten(0, x.shape)
        return logits

    def extra_repr(self) -> str:
        """Return the arguments that make the network."""
        tokens, width = self.embedding.weight.shape
        cells = self.out.in_features
        return f"{tokens}, embedding={width}, cells={cells}, dropout={self.dropout1.p}"


class TrajectoryLSTM(nn.Module):
    """The next position of a trajectory (Pacheco et al. 2021): x (n, T, k) -> (n, outputs).

    Its last hidden layer is `hidden3`, its last layer `out`: clients of NSIM send one of these. Not
    in the paper: positions are counted from the middle of the area in standard deviations of a
    uniform one, and hidden layers start as He et al. 2015 have them, biases at 0, so that layers
    reflect how far a user's positions spread.

    Args:
        coordinates: k, the coordinates of a position.
        outputs: numbers of the output.
        cells: cells of the LSTM, of which only the last step's output is used.
        width: width of the three hidden layers.
        dropout: dropout before each hidden layer but the first, and before the last Linear.
    """

    def __init__(
        self, coordinates: int, outputs: int, cells: int = 4, width: int = 20, dropout: float = 0.2
    ) -> None:
        super().__init__()
        # The order of layers is that in which their weights are drawn.
        self.lstm = LSTM(coordinates, cells)
        self.hidden1 = nn.Linear(cells, width)
        self.hidden2 = nn.Linear(width, width)
        self.hidden3 = nn.Linear(width, width)
        self.activation = nn.LeakyReLU()
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)
        self.dropout3 = nn.Dropout(dropout)
        self.out = nn.Linear(width, outputs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the dense layers' weights and set their biases to 0."""
        hidden_layers = (self.hidden1, self.hidden2, self.hidden3)
        for hidden in hidden_layers:
            nn.init.kaiming_uniform_(hidden.weight, nonlinearity="relu")
        for layer in (*hidden_layers, self.out):
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the position (n, outputs) after the T past ones.

        Args:
            x: positions in units of the area, (n, T, k).
        """
        standardized = (x - MIDDLE) / SPREAD
        h = self.lstm(standardized)[:, -1]
        h = self._hidden(h, self.hidden1, self.dropout1)
        h = self._hidden(h, self.hidden2, self.dropout2)
        h = self._hidden(h, self.hidden3, self.dropout3)
        position: torch.Tensor = MIDDLE + self.out(h)
        return position

    def extra_repr(self) -> str:
        """Return the arguments that make the network."""
        cells, width = self.hidden1.in_features, self.hidden1.out_features
        return (
            f"{self.lstm.inputs}, {self.out.out_features}, cells={cells}, width={width}, "
            f"dropout={self.dropout1.p}"
        )

    def _hidden(self, h: torch.Tensor, layer: nn.Module, dropout: nn.Module) -> torch.Tensor:
        out: torch.Tensor = dropout(self.activation(layer(h)))
        return out


def lstm_words(shape: Shape, classes: int) -> nn.Module:
    """Return a language model of two LSTM layers of 64 cells on embeddings of 64, dropout 0.2.

    It has 324,560 parameters for 2,000 words. Sattler et al. 2019, VI-D, train "a two-layer LSTM
    network" on AG-News without its widths: these are not in the paper.

    Args:
        shape: (L,).
        classes: number of tokens.
    """
    _check_tokens("lstm-words", shape)
    return LanguageLSTM(classes, embedding=64, cells=64, dropout=0.2)


def lstm_chars(shape: Shape, classes: int, cells: int = 96) -> nn.Module:
    """Return a language model of two LSTM layers on embeddings of 8.

    McMahan et al. 2017 and LEAF have 256 cells; 96 cells train on a CPU.

    Args:
        shape: (L,).
        classes: number of tokens.
        cells: cells of each layer.
    """
    _check_tokens("lstm-chars", shape)
    return LanguageLSTM(classes, embedding=8, cells=cells)


def lstm_chars_256(shape: Shape, classes: int) -> nn.Module:
    """Return `lstm_chars` with the papers' 256 cells.

    Args:
        shape: (L,).
        classes: number of tokens.
    """
    return lstm_chars(shape, classes, cells=256)


def lstm_trajectory(shape: Shape, classes: int) -> nn.Module:
    """Return the network of Pacheco et al. 2021, Section 3.1.

    An LSTM of 4 cells, and three Linear layers of 20 with leaky ReLU and dropout 0.2.

    Args:
        shape: (T, k).
        classes: coordinates of the predicted position.
    """
    if len(shape) != 2 or not min(shape):
        raise UsageError(
            "the model lstm-trajectory takes positions of shape (T, k), not samples of shape "
            f"{_printed(shape)}"
        )
    return TrajectoryLSTM(shape[1], classes)


def _check_tokens(name: str, shape: Shape) -> None:
    if len(shape) != 1 or not shape[0]:
        raise UsageError(
            f"the model {name} takes tokens of shape (L,), not samples of shape {_printed(shape)}"
        )


def _printed(shape: Shape) -> str:
    return "×".join(map(str, shape)) or "()"

"""Two recurrent networks: one reads a text and predicts its next character, one reads weather and predicts wind power.

    lstm        T tokens -> embedding 8 -> LSTM 100 -> LSTM 100 -> the last step -> dense classes     cross entropy
    wind-lstm   T x F numbers -> LSTM 32 -> LSTM 32 -> LSTM 32 -> the last step -> dense 1            mean squared error

For 80 kinds of tokens and as many classes lstm has 133,520 weights, for F = 5 wind-lstm has 21,921; neither number
depends on T. nn.LSTM runs all steps of a layer in one fused call.

Section E.1 of the first paper gives all of lstm, for T = 80, and takes it from LEAF. Start and biases (two a gate) are
torch's; LEAF has one, which begins at 1 in the forget gate. Section 6.4 of the second paper names a fully connected and
then a single dense layer behind the LSTMs, read here as one and the same; it does not give T.

Yang, H., Zhang, X., Khanduri, P., Liu, J.: Anarchic Federated Learning. ICML 2022.
Forootani, A., Iervolino, R.: Asynchronous Federated Learning: A Scalable Approach for Decentralized Machine Learning.
arXiv:2412.17723, 2024.
Caldas, S., et al.: LEAF: A Benchmark for Federated Settings. arXiv:1812.01097, 2018.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from ..errors import InputError
from .torch_module import TorchModule


class NextToken(nn.Module):
    """Logits of what comes after a row of tokens, given as integers or as floats that hold integers."""

    def __init__(self, vocabulary: int, classes: int, embedding: int, units: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, units, layers, batch_first=True)
        self.dense = nn.Linear(units, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, T) to logits (B, classes)."""
        tokens = indices(x.flatten(1), self.embedding.num_embeddings)
        steps, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.dense(steps[:, -1])
        return logits


class NextNumber(nn.Module):
    """One number per series of `shape` = (steps, numbers per step)."""

    def __init__(self, shape: tuple[int, int], units: int, layers: int) -> None:
        super().__init__()
        self.shape = shape
        self.lstm = nn.LSTM(shape[1], units, layers, batch_first=True)
        self.dense = nn.Linear(units, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Series (B, T, F), flat or not, to predictions (B,)."""
        steps, _ = self.lstm(x.reshape(-1, *self.shape))
        prediction: Tensor = self.dense(steps[:, -1])
        return prediction.squeeze(1)


def indices(x: Tensor, vocabulary: int) -> Tensor:
    """The tokens as indices into the embedding; datasets keep everything as float32."""
    tokens = x.long()
    if x.is_floating_point() and not bool((tokens == x).all()):
        raise InputError(f"a token is {float(x[tokens != x][0]):g}; expected integers")
    low, high = (int(end) for end in tokens.aminmax())
    if low < 0 or high >= vocabulary:
        raise InputError(f"a token is {low if low < 0 else high}; expected integers from 0 to {vocabulary - 1}")
    return tokens


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over the batch; labels may be (B,) or (B, 1), which must not be broadcast against each other."""
    if targets.numel() != outputs.numel():
        raise InputError(f"y has the shape {tuple(targets.shape)}; expected one number per example")
    return functional.mse_loss(outputs, targets.reshape(outputs.shape).to(outputs.dtype))


def text(length: int, vocabulary: int, classes: int, embedding: int, units: int, layers: int) -> TorchModule:
    """lstm as a flat-vector model, for rows of `length` tokens."""
    return TorchModule(
        lambda: NextToken(vocabulary, classes, embedding, units, layers), features=length, classes=classes
    )


def wind(shape: tuple[int, int], units: int, layers: int) -> TorchModule:
    """wind-lstm as a flat-vector model, for series of that shape."""
    return TorchModule(lambda: NextNumber(shape, units, layers), loss=squared_error, features=shape[0] * shape[1])

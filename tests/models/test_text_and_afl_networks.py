"""afl-cnn against the same network written plainly; transformer on a checkpoint made here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from aflock import models, rng
from aflock.errors import InputError
from aflock.models.torch_module import TorchModule
from aflock.models.transformer import locate
from tests.models.toy_data import Data

DRAWS = np.random.default_rng(0)


def test_afl_cnn_is_the_network_of_the_papers_table() -> None:
    """Channels first, ReLU before pooling, sizes by hand."""
    model = models.create("afl-cnn", Data(np.zeros((1, 28, 28, 1), np.float32), 10))
    assert isinstance(model, TorchModule)
    assert model.length == (25 * 32 + 32) + (32 * 25 * 64 + 64) + (1024 * 512 + 512) + (512 * 128 + 128) + (1290)
    part = dict(model.module.named_parameters())
    x = torch.from_numpy(DRAWS.standard_normal((3, 28, 28, 1), np.float32))
    z = x.permute(0, 3, 1, 2).contiguous()
    for name in ("conv1", "conv2"):
        z = functional.max_pool2d(
            functional.relu(functional.conv2d(z, part[f"{name}.weight"], part[f"{name}.bias"])), 2
        )
    z = z.permute(0, 2, 3, 1).flatten(1)
    for name in ("dense1", "dense2"):
        z = functional.relu(functional.linear(z, part[f"{name}.weight"], part[f"{name}.bias"]))
    z = functional.linear(z, part["dense3.weight"], part["dense3.bias"])
    torch.testing.assert_close(model.module(x), z, rtol=1e-4, atol=1e-5)


def test_afl_cnn_on_images_that_are_too_small() -> None:
    with pytest.raises(InputError, match="afl-cnn expects images of at least 16x16"):
        models.create("afl-cnn", Data(np.zeros((1, 12, 12, 1), np.float32), 10))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A BERT of two tiny layers, saved as any other."""
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("tiny-bert")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20,
        max_position_embeddings=12,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return str(folder)


def texts(count: int = 6) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.int64]], ...]:
    draws = np.random.default_rng(1)
    tokens = draws.integers(1, 30, (count, 10))
    tokens[:, 7:] = 0  # padding
    return tokens, draws.integers(0, 3, count)


def test_a_transformer_learns_from_its_checkpoint(checkpoint: str) -> None:
    x, y = texts()
    model = models.create("transformer", Data(x, 3), checkpoint=checkpoint)
    w = model.init(rng.stream(0, "w"))
    again = models.create("transformer", Data(x, 3), checkpoint=checkpoint)
    assert np.array_equal(w, again.init(rng.stream(0, "w")))
    assert not np.array_equal(w, model.init(rng.stream(1, "w")))  # the head is new; the encoder is not
    assert np.mean(w == model.init(rng.stream(1, "w"))) > 0.9
    g, h = np.empty_like(w), np.empty_like(w)
    before = model.evaluate(w, x, y).loss
    model.gradient(w, x, y, g)
    again.gradient(w, x, y, h)
    assert np.array_equal(g, h)
    for _ in range(30):
        model.gradient(w, x, y, g)
        w -= np.float32(0.1) * g
    assert model.evaluate(w, x, y).loss < 0.7 * before


def test_padding_does_not_count(checkpoint: str) -> None:
    x, _ = texts()
    model = models.create("transformer", Data(x, 3), checkpoint=checkpoint)
    assert isinstance(model, TorchModule)
    model.module.eval()
    longer = np.concatenate([x, np.zeros((len(x), 2), np.int64)], axis=1)
    with torch.no_grad():
        torch.testing.assert_close(model.module(torch.from_numpy(x)), model.module(torch.from_numpy(longer)))


def test_fewer_layers_and_no_checkpoint(checkpoint: str, tmp_path: Path) -> None:
    x, _ = texts()
    whole = models.create("transformer", Data(x, 3), checkpoint=checkpoint)
    half = models.create("transformer", Data(x, 3), checkpoint=checkpoint, layers=1)
    assert half.length < whole.length
    with pytest.raises(InputError, match="cannot be loaded"):
        models.create("transformer", Data(x, 3), checkpoint=str(tmp_path))
    with pytest.raises(InputError, match="transformer expects a row of tokens"):
        models.create("transformer", Data(np.zeros((2, 3, 3), np.int64), 3), checkpoint=checkpoint)
    assert locate("aflock") == "aflock"  # a package without a checkpoint is left to the hub

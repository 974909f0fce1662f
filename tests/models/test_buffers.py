"""Batch norm's buffers: refused, kept by each client, or averaged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from aflock.errors import InputError, VectorError
from aflock.models.torch_module import TorchModule
from tests.models.torch_modules import CLASSES, FEATURES, autograd, batch, gradient, moved, normed, plain, start

pytestmark = pytest.mark.usefixtures("one_thread")


def test_refuse() -> None:
    with pytest.raises(InputError, match=r"has buffers \(1.running_mean, 1.running_var, 1.num_.*'local' or 'average'"):
        TorchModule(normed)
    deep = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    with pytest.raises(InputError, match=r"num_batches_tracked, \.\.\.\)"):
        TorchModule(deep)


def test_buffers_outside_the_saved_state_are_constants() -> None:
    module = nn.Linear(FEATURES, CLASSES)
    module.register_buffer("mask", torch.ones(3), persistent=False)
    assert TorchModule(module).length == (FEATURES + 1) * CLASSES


def test_local_buffers_stay_with_the_client() -> None:
    model = TorchModule(normed, buffers="local")
    fresh = model.get_buffers()
    assert model.length == TorchModule(plain).length + 10
    assert fresh.tolist() == 5 * [0.0] + 5 * [1.0] + [0.0]
    w = start(model)
    kept = {}
    for client in (0, 1):
        model.set_buffers(fresh)
        gradient(model, w, *batch(20, seed=client))
        kept[client] = model.get_buffers()
    for client in (0, 1):
        mean, variance = moved(w, batch(20, seed=client)[0])
        assert np.allclose(kept[client], [*mean, *variance, 1], atol=1e-6)
    x, y = batch(50, seed=2)
    found = []
    for client in (0, 1):
        model.set_buffers(kept[client])
        found.append(model.evaluate(w, x, y).loss)
        assert np.array_equal(model.get_buffers(), kept[client])
    assert found[0] != found[1]
    with pytest.raises(VectorError, match=r"the buffers have the shape \(3,\); expected \(11,\)"):
        model.set_buffers(np.zeros(3))


@pytest.mark.parametrize("rate", [1.0, 0.1, 0.013])
def test_averaged_buffers_arrive_with_the_step(rate: float) -> None:
    """x_{k+1} = x_k - rate*g carries what a plain module's batch norm has after the same batches."""
    model = TorchModule(normed, buffers="average", rate=rate)
    trained = TorchModule(plain).length + 10
    assert model.length == trained + 10
    x = start(model)
    assert x[trained:].tolist() == 5 * [0.0] + 5 * [1.0]
    mean, variance = moved(x, batch(20)[0])
    reference = normed()
    torch.nn.utils.vector_to_parameters(torch.tensor(x[:trained]), reference.parameters())
    descent = torch.optim.SGD(reference.parameters(), lr=rate)
    for k in range(4):
        a, b = batch(20, seed=1 + k)
        value, g = gradient(model, x, a, b)
        assert value == pytest.approx(autograd(reference, a, b)[0], rel=1e-5)
        descent.step()
        x -= np.float32(rate) * g
        if k == 0:
            assert np.allclose(x[trained:], [*mean, *variance], atol=1e-6)
        expected = torch.cat([t.flatten() for t in reference.buffers() if t.is_floating_point()])
        assert np.allclose(x[trained:], expected.numpy(), atol=1e-5)
    assert model.get_buffers().tolist() == [4.0]  # the count is no float: it stays local
    reference.eval()
    a, b = batch(50, seed=9)
    loss = functional.cross_entropy(reference(torch.tensor(a)), torch.tensor(b))
    assert model.evaluate(x, a, b).loss == pytest.approx(float(loss.detach()), rel=1e-4)


def test_averaged_buffers_depend_on_the_arguments_alone() -> None:
    model = TorchModule(normed, buffers="average", rate=0.1)
    w, (x, y) = start(model), batch(20)
    first = gradient(model, w, x, y)[1]
    gradient(model, w + np.float32(1), *batch(20, seed=2))
    assert np.array_equal(gradient(model, w, x, y)[1], first)
    model.weights[:] = w
    assert np.array_equal(gradient(model, model.weights, x, y)[1], first)
    assert np.array_equal(model.weights, w)


def test_averaging_models_averages_buffers() -> None:
    """Two clients, one step each from the same model: the mean of x_1 holds the mean of their running statistics."""
    model = TorchModule(normed, buffers="average", rate=0.1)
    w = start(model)
    ends = [w - np.float32(0.1) * gradient(model, w, *batch(20, seed=client))[1] for client in (0, 1)]
    mean = np.mean(ends, axis=0)
    statistics = [np.concatenate(moved(w, batch(20, seed=client)[0])) for client in (0, 1)]
    assert np.allclose(mean[-10:], np.mean(statistics, axis=0), atol=1e-6)


class Rebinding(nn.Module):
    """Replaces its buffer by another tensor instead of moving it in place."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mean", torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return self.last(x - self.mean)


def test_buffers_that_are_replaced() -> None:
    x, y = batch(8)
    model = TorchModule(Rebinding, buffers="average", rate=0.5)
    w = start(model)
    _, out = gradient(model, w, x, y)
    assert np.allclose((w - np.float32(0.5) * out)[-FEATURES:], 0.5 * x.mean(0), atol=1e-6)
    assert np.array_equal(gradient(model, w, x, y)[1], out)

    local = TorchModule(Rebinding, buffers="local")
    gradient(local, w[:-FEATURES].copy(), x, y)
    assert np.allclose(local.get_buffers(), 0.5 * x.mean(0), atol=1e-6)
    local.set_buffers(np.arange(6.0))
    assert local.get_buffers().tolist() == [0, 1, 2, 3, 4, 5]


def test_an_error_leaves_the_buffers_as_they_were() -> None:
    model = TorchModule(normed, buffers="average", rate=0.1)
    w, (x, y) = start(model), batch(20)
    model.weights[:] = w
    with pytest.raises(InputError, match="a label is 4"):  # the first batch: only the outputs tell how many classes
        model.gradient(model.weights, x, np.full_like(y, 4), np.empty_like(w))
    assert np.array_equal(model.weights, w)
    local = TorchModule(normed, buffers="local", classes=CLASSES)
    before = local.get_buffers()
    with pytest.raises(InputError, match="a label is 4"):
        local.gradient(w[:-10].copy(), x, np.full_like(y, 4), np.empty(local.length, np.float32))
    assert np.array_equal(local.get_buffers(), before)

"""The trainer: what it keeps of a client, and which batches it believes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aflock import Job, errors, local, models
from aflock.local import Memory
from aflock.models.torch_module import TorchModule
from aflock.training.trainer import Trainer
from tests.models.torch_modules import CLASSES, FEATURES, batch, normed, start
from tests.models.toy_data import Data


def test_a_new_client_begins_with_the_buffers_of_the_model_not_of_the_client_before() -> None:
    model = TorchModule(normed, buffers="local")
    fresh, w = model.get_buffers(), start(model)
    trainer = Trainer(model, local.create("sgd"), needs=("delta",), changes=())

    def trained(client: int, memory: Memory) -> Any:
        task = trainer.task(lambda k: batch(20, seed=10 * client + k), 3)
        done = trainer.train(Job(client, 0, w), task, 3, memory, 0.0)
        return done.memory["buffers"].copy()

    one, two = trained(1, {}), trained(2, {})
    assert not np.array_equal(one, fresh)
    assert not np.array_equal(one, two)
    np.testing.assert_array_equal(trained(1, {}), one)
    np.testing.assert_array_equal(trained(2, {"buffers": fresh}), two)
    assert not np.array_equal(trained(2, {"buffers": one}), two)


@pytest.mark.parametrize("needs", [("delta",), ("gradient",)])
def test_batches_that_are_not_trusted_are_checked(needs: tuple[str, ...]) -> None:
    model = models.create("logistic", Data(np.zeros((1, FEATURES), np.float32), CLASSES))
    trainer = Trainer(model, local.create("sgd"), needs=needs, changes=(), trusted=False)
    x, y = batch(5)
    for labels in (y + CLASSES, y[:-1]):
        task = trainer.task(lambda k, labels=labels: (x, labels), 1)  # type: ignore[misc]
        with pytest.raises(errors.InputError):
            trainer.train(Job(0, 0, np.zeros(model.length, np.float32)), task, 2, {}, 0.0)

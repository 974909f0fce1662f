"""The examples of each client, and a table of them for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import InputError
from .base import Integers, check_labels, frozen

EDGE = 20  # how many clients the table shows at either end of a long list
WIDTH = 10  # how many classes it shows of one client


@dataclass(frozen=True, eq=False)
class Partition:
    """The examples of each client: together 0 .. N-1, each exactly once."""

    indices: tuple[Integers, ...]

    def __post_init__(self) -> None:
        if not self.indices:
            raise InputError("a partition has no clients; expected at least one")
        sizes = [len(part) for part in self.indices]
        if 0 in sizes:
            raise InputError(f"client {sizes.index(0)} has no examples; every client needs at least one")
        examples = np.concatenate(self.indices)
        if examples.dtype.kind not in "iu" or not np.array_equal(np.sort(examples), np.arange(len(examples))):
            raise InputError(f"a partition must hold each of the examples 0 to {len(examples) - 1} exactly once")
        owners = np.repeat(np.arange(len(sizes)), sizes)
        ordered = frozen(examples[np.lexsort((examples, owners))].astype(np.int64))
        object.__setattr__(self, "indices", tuple(np.split(ordered, np.cumsum(sizes)[:-1])))

    @property
    def sizes(self) -> Integers:
        """How many examples each client has."""
        return np.array([len(part) for part in self.indices], np.int64)

    def counts(self, labels: Integers, classes: int) -> Integers:
        """How many examples of each class each client has (clients x classes)."""
        sizes = self.sizes
        if labels.shape != (sizes.sum(),):
            raise InputError(f"labels has shape {labels.shape}; expected one for each of the {sizes.sum()} examples")
        if labels.dtype.kind not in "iu":
            raise InputError(f"labels has dtype {labels.dtype}; only classes can be counted")
        check_labels(labels, classes, "labels")
        cells = np.repeat(np.arange(len(sizes)), sizes) * classes + labels[np.concatenate(self.indices)]
        return np.bincount(cells, minlength=len(sizes) * classes).reshape(-1, classes)

    def table(self, labels: Integers, classes: int) -> str:
        """One line per client (its size, and class:examples by frequency) and a summary, for people."""
        counts = self.counts(labels, classes)
        return "\n".join(["client  examples  class:examples", *_rows(counts), _summary(counts)])


def _rows(counts: Integers) -> Iterator[str]:
    clients = len(counts)
    for client in range(clients):
        if clients <= 2 * EDGE or client < EDGE or client >= clients - EDGE:
            yield f"{client:>6}  {counts[client].sum():>8}  {_classes(counts[client])}"
        elif client == EDGE:
            yield f"   ...  ({clients - 2 * EDGE} more clients)"


def _classes(row: Integers) -> str:
    held = [label for label in np.argsort(-row, kind="stable") if row[label]]
    shown = " ".join(f"{label}:{row[label]}" for label in held[:WIDTH])
    return shown + (f" and {len(held) - WIDTH} more" if len(held) > WIDTH else "")


def _summary(counts: Integers) -> str:
    sizes, held = counts.sum(1), (counts > 0).sum(1)
    return (
        f"{len(sizes)} clients hold {sizes.sum()} examples: {_range(sizes)} each, "
        f"of {_range(held)} of the {counts.shape[1]} classes"
    )


def _range(values: Integers) -> str:
    return f"{values.min()} to {values.max()} (mean {values.mean():.1f})"

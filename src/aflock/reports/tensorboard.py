"""Measurements for TensorBoard; needs the package tensorboardX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError

_SHOWN = ("accuracy", "loss", "versions", "time", "staleness_mean", "gradients", "bytes_up", "bytes_down")


class Board:
    """One event file per process that wrote, all in one folder; the horizontal axis counts uploads."""

    def __init__(self, folder: Path) -> None:
        try:
            import tensorboardX
        except ModuleNotFoundError:
            raise InputError("--tensorboard needs tensorboardX: pip install 'aflock[tensorboard]'") from None
        self._writers = tensorboardX
        self._folder = folder
        self._after: int | None = None
        self._writer: Any = None

    def forget_after(self, uploads: int) -> None:
        """A resumed run: what an earlier process wrote beyond this point no longer counts."""
        self._after = uploads + 1

    def add(self, uploads: int, measured: Mapping[str, float]) -> None:
        """One measurement."""
        if self._writer is None:
            self._writer = self._writers.SummaryWriter(str(self._folder), purge_step=self._after)
        for name in _SHOWN:
            self._writer.add_scalar(name, measured[name], uploads)

    def close(self) -> None:
        """Writes what is left."""
        if self._writer is not None:
            self._writer.close()

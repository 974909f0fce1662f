"""Writes measurements for TensorBoard; needs the optional package tensorboardX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError

_SHOWN = ("accuracy", "loss", "versions", "time", "staleness_mean", "gradients", "bytes_up", "bytes_down")


class TensorBoardWriter:
    """One event file per process that wrote, all in one folder; the horizontal axis counts uploads."""

    def __init__(self, folder: Path) -> None:
        try:
            import tensorboardX  # optional, and slow to import
        except ModuleNotFoundError:
            raise InputError("--tensorboard needs tensorboardX: pip install 'aflock[tensorboard]'") from None
        self._library = tensorboardX
        self._folder = folder
        self._after: int | None = None
        self._writer: Any = None

    def forget_after(self, uploads: int) -> None:
        """A resumed run: TensorBoard is to ignore what an earlier process wrote beyond this point."""
        self._after = uploads + 1

    def add(self, uploads: int, measured: Mapping[str, float]) -> None:
        """Writes one measurement."""
        if self._writer is None:
            self._writer = self._library.SummaryWriter(str(self._folder), purge_step=self._after)
        for name in _SHOWN:
            self._writer.add_scalar(name, measured[name], uploads)

    def close(self) -> None:
        """Writes what is still in memory."""
        if self._writer is not None:
            self._writer.close()

"""Training: one trainer for every client, simulated or real. job + model + local rule + batches -> update."""

from __future__ import annotations

from .trainer import Batch, Trainer, check_rate

__all__ = ["Batch", "Trainer", "check_rate"]

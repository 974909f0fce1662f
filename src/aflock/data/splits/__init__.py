"""The ways to split examples over clients, one per file; importing one registers it."""

from __future__ import annotations

from . import classes, dirichlet, iid, key  # noqa: F401

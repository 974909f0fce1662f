"""Where a rule with one exact row per client keeps its rows."""

from __future__ import annotations

from dataclasses import dataclass

from ..params import Params, choice, folder


@dataclass(frozen=True)
class CacheParams(Params):
    """In memory or on disk."""

    cache: str = choice("dense", ("dense", "disk"), "where the rows are kept: in memory or in a memory-mapped file")
    cache_dir: str | None = folder(
        "folder of disk rows; None: the system's temporary folder", only={"cache": ("disk",)}
    )

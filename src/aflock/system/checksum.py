"""CRC-32, by the fastest library that is installed."""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32  # the same checksums as zlib, ten times as fast
except ModuleNotFoundError:
    from zlib import crc32

__all__ = ["crc32"]

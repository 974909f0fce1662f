"""CRC-32, as fast as this machine has it."""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32  # the same numbers, ten times as fast
except ModuleNotFoundError:
    from zlib import crc32

__all__ = ["crc32"]

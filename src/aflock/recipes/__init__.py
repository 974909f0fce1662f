"""Every table and figure of the papers as an experiment file plus the paper's numbers (one TOML file each)."""

from . import report
from .recipe import Recipe, entries, names, read

__all__ = ["Recipe", "entries", "names", "read", "report"]

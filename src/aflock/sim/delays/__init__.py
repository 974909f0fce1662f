"""How long a job takes: one file per kind of answer, all known by name."""

from . import basic, recorded
from .base import Delay, Entry, create, entries, get, names, register

__all__ = ["Delay", "Entry", "basic", "create", "entries", "get", "names", "recorded", "register"]

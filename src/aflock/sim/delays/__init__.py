"""How long a job takes: one file per kind of answer, all known by name."""

from . import basic, recorded
from .base import Delay, DelayEntry, create, entries, get, names, register

__all__ = ["Delay", "DelayEntry", "basic", "create", "entries", "get", "names", "recorded", "register"]

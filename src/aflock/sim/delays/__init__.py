"""Delays: how long a job takes, by a formula (`basic.py`) or from a recording (`recorded.py`); registered by name."""

from . import basic, recorded
from .base import Delay, DelayEntry, create, entries, get, names, register

__all__ = ["Delay", "DelayEntry", "basic", "create", "entries", "get", "names", "recorded", "register"]

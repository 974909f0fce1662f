"""What storage must know about a federation; `server.settings.Settings` implements it.

Storage must not import the server, so it names here the few methods that it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...data import Dataset
from ...events import Event
from ...models.base import Model
from ...types import Vector
from ..federation.federation import Federation
from ..federation.terms import Terms


@dataclass(frozen=True)
class Start:
    """What a federation begins with."""

    w0: Vector
    judge: tuple[Model, Dataset] | None
    """What the server evaluates the model with; None: the server knows only the number of weights."""


class Configuration(Protocol):
    """A federation file, as far as storage needs it."""

    def start(self) -> Start:
        """The model w^0, the same at every start."""

    def federation(self, w0: Vector, on_event: Callable[[Event], None] | None = None) -> Federation:
        """The federation before its first record."""

    def terms(self) -> Terms:
        """When the federation ends, and which norms it accepts until then."""

    def check_continues(self, kept: Mapping[str, Any], file: Path) -> None:
        """Raises `StateError` if `kept`, the content of `file`, has another rule or model than this configuration."""

    def text(self) -> str:
        """The federation file with every default written out."""

    def section(self, key: str) -> Any:
        """The parameters of a section; storage reads `snapshot`, `snapshots` and `archive` of [server]."""

"""The exception tree.

    AflockError
    ├── InputError (ValueError)            something handed in is wrong; nothing was changed
    │   ├── VectorError                    wrong length, dtype, shape or a non-finite value
    │   ├── MissingVector                  an update lacks a vector the rule needs
    │   ├── UnknownClient                  a client that is not in the federation
    │   ├── DuplicateClient                a client that is in the federation already
    │   ├── VersionError                   a version that has never existed
    │   ├── CountError                     steps or examples below one or above 2^63-1
    │   ├── ParameterError                 a hyper-parameter out of its range
    │   │   └── UnknownParameter (TypeError)
    │   ├── UnknownName                    no rule of that name is registered
    │   ├── FirstGradients                 first gradients missing, or given where none belong
    │   ├── DuplicateUpdate                an update for a job that is not open (any more)
    │   └── StateError                     a saved state that does not fit what loads it
    ├── OrderError (RuntimeError)          a call before `start`, or a second `start`
    └── DoesNotFit (MemoryError)           more bytes asked for than the machine has

Every message is one sentence that says what was wrong and what was expected.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AflockError(Exception):
    """Root of every error aflock raises on purpose."""


class InputError(AflockError, ValueError):
    """Something handed in is wrong; the receiver's state is as it was before the call."""


class VectorError(InputError):
    """A vector has the wrong type, dtype, length, or a value that is not finite."""


class MissingVector(InputError):
    """An update does not carry a vector its rule needs."""


class UnknownClient(InputError):
    """The client is not in the federation."""


class DuplicateClient(InputError):
    """The client is in the federation already."""


class VersionError(InputError):
    """The version is negative, not an integer, or newer than the model."""


class CountError(InputError):
    """A number of steps or examples that is not a positive integer, or does not fit into 64 bits."""


class ParameterError(InputError):
    """A hyper-parameter is out of its range."""


class UnknownParameter(ParameterError, TypeError):
    """A hyper-parameter the rule does not have."""


class UnknownName(InputError):
    """No rule of that name is registered."""


class FirstGradients(InputError):
    """First gradients are missing, or were given to a rule that takes none."""


class DuplicateUpdate(InputError):
    """An update for a job that is not open: it was answered, dropped or never handed out."""


class StateError(InputError):
    """A saved state that does not belong to the object asked to load it."""


class NewerFormat(StateError):
    """A saved state of a format that this version does not know: it is not damaged."""


class OrderError(AflockError, RuntimeError):
    """A call that came before `start`, or a second `start`."""


class DoesNotFit(AflockError, MemoryError):
    """More bytes were asked for than the machine can give."""


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The nearest known name as a question for an error's sentence; nothing if none is that similar (0 to 1)."""
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}? " if near else ""

"""One client rule per file; importing this package registers them all."""

from __future__ import annotations

from . import adam, adamasfl, fedprox, masfl, scaffold, sgd  # noqa: F401  (importing a rule registers it)

"""One paper's server rule per file; importing this package registers them all."""

from __future__ import annotations

from . import (  # noqa: F401  (importing a rule registers it)
    ace,
    aced,
    adamasfl,
    afa_cd,
    afa_cs,
    afl,
    asgd,
    ca2fl,
    delay_adaptive,
    fadas,
    fedasync,
    fedavg,
    fedbuff,
    masfl,
    mr_asyncfl,
    rolling_fedavg,
    scaffold,
    twafl,
)

"""Connects this process to a Ray cluster, or starts one on this machine. Nothing of Ray is imported before that.

What an address may be:

    None              a cluster of this machine's cores, started for this process; it ends with the connection
    auto              the cluster that this machine is a node of
    HOST:PORT         the cluster whose head node listens there
    ray://HOST:PORT   a cluster reached through Ray Client
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from typing import Any, Self

from ..errors import AflockError
from .optional import need

_CONNECT_SECONDS = 5.0
"""How long the head node has to accept a connection; Ray itself would try for minutes."""

_OWN_ADDRESS = "127.0.0.2"
"""The address of a cluster that this process starts: only this machine need reach it, and not every version of Ray asks
for a token. Ray replaces 127.0.0.1 by the machine's outer address, but not other addresses of the loopback range."""


class ClusterError(AflockError):
    """There is no cluster to work with: none answers, or it does not fit to this process."""


class Cluster:
    """A connection to a Ray cluster; `close` ends it, unless the caller's own program had made it before."""

    def __init__(self, address: str | None = None, *, cpus: int | None = None) -> None:
        """`cpus`: cores of a cluster that is started for this process."""
        need("ray", extra="ray", what="the executor ray")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        self._is_own = not ray.is_initialized()
        if self._is_own:
            _connect(ray, address, cpus)

    @property
    def cores(self) -> int:
        """How many cores the nodes of the cluster have together."""
        import ray

        return max(1, int(ray.cluster_resources().get("CPU", 1)))  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; a cluster that was started for it ends, too."""
        import ray

        if self._is_own:
            ray.shutdown()


def _connect(ray: Any, address: str | None, cpus: int | None) -> None:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        options |= {"num_cpus": cpus, "include_dashboard": False}
        own = _OWN_ADDRESS if sys.platform == "linux" else None
    else:
        options["address"] = address
        own = _check_answers(address)
    if own is not None:
        options["_node_ip_address"] = own
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ClusterError(_sentence(address, error)) from None


def _check_answers(address: str) -> str | None:
    """Raises if nothing listens at the address; returns the address of this node if it is one of the loopback range."""
    if address == "auto":
        return None
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ClusterError(f"{address!r} is not the address of a cluster; give auto, HOST:PORT or ray://HOST:PORT")
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ClusterError(
            f"no Ray cluster answers at {address} ({error}); start one with `ray start --head`, or leave out --address"
        ) from None
    try:
        return host if ipaddress.ip_address(host).is_loopback and not address.startswith("ray://") else None
    except ValueError:  # a name
        return None


def _sentence(address: str | None, error: Exception) -> str:
    text = " ".join(str(error).split())
    if "ersion mismatch" in text:
        return (
            f"the cluster has another version of Ray or Python than this process ({text}); install the same on both "
            "sides"
        )
    if address == "auto":
        return f"this machine is not a node of a Ray cluster ({text}); give --address HOST:PORT, or leave it out"
    if address is None:
        return f"a Ray cluster on this machine cannot be started: {text}"
    return (
        f"the Ray cluster at {address} cannot be used: {text}; if it asks for a token, set RAY_AUTH_MODE=token in the "
        "environment"
    )

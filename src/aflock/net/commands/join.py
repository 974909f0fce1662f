"""`aflock join`: takes part in a federation with the model and the batches of a client file.

It ends when the federation has ended, after --jobs jobs, or at Ctrl-C.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from ...errors import AflockError
from ...system.optional import need
from ..client.client_file import load, location, one_line


class TrainingFailed(AflockError):
    """The code of a client file raised an exception, which is the cause of this one."""


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    need("aiohttp", extra="net", what="a client")
    from ..client.client import Client

    logging.basicConfig(level=logging.WARNING if options.quiet else logging.INFO, format="%(message)s")
    arguments = load(options.client_file)
    client = Client(
        options.url,
        Path(options.token_file),
        ca=None if options.ca is None else Path(options.ca),
        state_dir=None if options.state_dir is None else Path(options.state_dir),
        insecure=options.insecure,
        certificate=None if options.certificate is None else Path(options.certificate),
        key=None if options.key is None else Path(options.key),
    )
    try:
        client.run(**arguments, jobs=options.jobs)
    except AflockError:
        raise
    except Exception as error:  # errors of the network and of the client's state are AflockErrors
        raise TrainingFailed(f"training failed in {location(options.client_file, error)}: {one_line(error)}") from error
    return 0

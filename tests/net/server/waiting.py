"""A pull that waits, in a thread."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator

from tests.net.real_server import Peer


class Waited:
    status, code, seconds = 0, "", 0.0


@contextlib.contextmanager
def waiting(peer: Peer, seconds: int) -> Iterator[Callable[[], Waited]]:
    """A pull that waits, in a thread; what is yielded waits for its end."""
    found = Waited()

    def pull() -> None:
        begun = time.monotonic()
        found.status, _, body = peer.pull(wait=seconds)
        found.seconds = time.monotonic() - begun
        if found.status >= 400:
            found.code = json.loads(body)["code"]

    thread = threading.Thread(target=pull)
    thread.start()

    def end() -> Waited:
        thread.join(60)
        return found

    yield end
    end()

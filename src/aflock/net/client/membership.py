"""What a run needs of the federation it takes part in: the last hello, the client's state, and a training function."""

from __future__ import annotations

from collections.abc import Callable

from .answers import Hello
from .run_types import Train
from .state import ClientState


class Membership:
    """Made from the first hello; `follow` adapts it to every later one.

    hello    the federation and its settings, as the server last described them
    state    the client's state in that federation
    train    the function that trains one job with those settings
    """

    def __init__(
        self, hello: Hello, open_state: Callable[[Hello], ClientState], prepare: Callable[[Hello], Train]
    ) -> None:
        self._open_state, self._prepare = open_state, prepare
        self.hello = hello
        self.state = open_state(hello)
        try:
            self.train = prepare(hello)
        except BaseException:
            self.state.close()
            raise

    def follow(self, hello: Hello) -> None:
        """Adopts a new hello: opens the state of another federation, and prepares training if its terms changed.

        The state of the federation before stays on disk.
        """
        before, self.hello = self.hello, hello
        if hello.federation != before.federation:
            self.state.close()
            self.state = self._open_state(hello)
        if hello.terms != before.terms:
            self.train = self._prepare(hello)

    def close(self) -> None:
        """Unlocks the state, so that another process may be this client; a second call does nothing."""
        self.state.close()

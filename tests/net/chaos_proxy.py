"""A line that cannot be trusted: a proxy that cuts connections in the middle of bodies and loses answers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Literal

Fate = Literal["whole", "request cut", "answer cut", "answer lost"]
FATES: tuple[Fate, ...] = ("whole", "whole", "request cut", "answer cut", "answer lost")

_PIECE = 1 << 14


class Proxy:
    """Hands everything from its own port to another and back, until a connection meets its fate."""

    def __init__(self, target: int, reach: int, draws: random.Random) -> None:
        """`reach` is how many bytes a connection carries at most before something befalls it."""
        self._target, self._reach, self._draws = target, reach, draws
        self._server: asyncio.Server | None = None
        self.calm = False
        """Whether connections are left alone."""
        self.met: Counter[Fate] = Counter()
        """How many connections had which fate."""

    async def start(self) -> int:
        """Begins to listen; the port."""
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        """Takes no more connections."""
        if self._server is not None:
            self._server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:  # the server is down
            writer.transport.abort()
            return
        fate: Fate = "whole" if self.calm else self._draws.choice(FATES)
        there = _Way(reader, far_writer, self._length() if fate == "request cut" else None)
        back = _Way(far_reader, writer, self._length() if fate.startswith("answer") else None, fate == "answer lost")
        ways = [asyncio.create_task(way.run()) for way in (there, back)]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            cut = there.is_cut or back.is_cut
            self.met[fate if cut else "whole"] += 1
            for way in ways:
                way.cancel()
            for side in (writer, far_writer):
                if cut:
                    side.transport.abort()
                else:
                    side.close()

    def _length(self) -> int:
        return int(self._draws.random() ** 2 * self._reach)


class _Way:
    """One direction of a connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int | None, swallows: bool = False
    ) -> None:
        self._reader, self._writer, self._left, self._swallows = reader, writer, length, swallows
        self.is_cut = False

    async def run(self) -> None:
        """Until one side hangs up, or the bytes this way may carry are through."""
        try:
            while piece := await self._reader.read(_PIECE):
                if self._left is not None and len(piece) > self._left:
                    self.is_cut = True
                    self._writer.write(b"" if self._swallows else piece[: self._left])
                    await asyncio.sleep(0.002 if self._swallows else 0)  # time to answer to the end, for nobody
                    return
                self._left = None if self._left is None else self._left - len(piece)
                self._writer.write(piece)
                await self._writer.drain()
        except OSError:
            return

"""Applies journal records to a federation, also where its rule fails. The server, recovery and replay all use it.

A record is in the journal before it is applied, so the server cannot drop a record at which the rule raises: the next
start would read it again. The rule may have changed any part of its state before it raised, and no copy of the state
is kept in memory, because that would double the memory and cost a copy per record. `Applying` therefore rebuilds the
state before the record: it restores the newest saved state, and applies the records after it again. It then applies
the record as a rejection (`Federation.reject`). A rule's errors depend on its state and the record alone, so every
start and every replay makes the same rejection, the same trace and the same bits.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from ..federation.federation import Federation, RecordHead
from ..federation.rule_failed import RuleFailed
from ..protocol.refusals import Refused
from ..protocol.wire import BytesLike
from .segment import Record

log = logging.getLogger("aflock.server")


class Applying:
    """Applies journal records to one federation, in their order."""

    def __init__(
        self,
        federation: Federation,
        events: list[Any],
        restore: Callable[[], int],
        read: Callable[[int, int], Iterator[Record]],
    ) -> None:
        """`restore` loads an earlier state into the federation and returns the seq of its last record.

        `read(after, upto)` yields journal records again. `events` is the list to which the federation appends its
        events; `Applying` removes those of a failed record, and those of records that it applies again.
        """
        self._federation, self._events, self._restore, self._read = federation, events, restore, read
        self.seq = 0
        """The seq of the record that was applied last; whoever loads a state sets it."""
        self._rejected: dict[int, tuple[str, bool]] = {}
        """The arguments `why` and `flush` of `Federation.reject`, by the seq of the record at which the rule failed."""
        self.failed = False
        """Whether the rule has failed since the caller last set this to false."""

    def apply(self, head: RecordHead, body: BytesLike) -> Any:
        """Applies the next record of the journal and returns what the federation returns.

        Raises `Refused` if the federation refuses the record: it is in the journal, too, and changes nothing.
        """
        self.seq = seq = self.seq + 1
        before = len(self._events)
        try:
            return self._federation.apply(head, body)
        except RuleFailed as failure:
            self.failed = True
            log.error("record %d (%s): %s; the record is rejected", seq, head["k"], failure, exc_info=failure.__cause__)
            return self._reject(seq, head, failure.reason, before)

    def _reject(self, seq: int, head: RecordHead, why: str, before: int) -> Any:
        """Rebuilds the state before the record and applies the record as a rejection.

        A rejected update can spend the budget; the rule then makes its last step, and may fail in that, too. In that
        case the rejection is made once more, without the last step.
        """
        try:
            self._rebuild(seq, before)
            self._rejected[seq] = (why, True)
            return self._federation.reject(head, why, flush=True)
        except RuleFailed:
            self._rebuild(seq, before)
            self._rejected[seq] = (why, False)
            return self._federation.reject(head, why, flush=False)

    def _rebuild(self, seq: int, before: int) -> None:
        """Makes the federation what it was before the record `seq`; of the events, only the first `before` stay."""
        saved = self._restore()
        self._rejected = {each: arguments for each, arguments in self._rejected.items() if each > saved}
        for record in self._read(saved, seq - 1):
            with suppress(Refused):  # the federation refused the record the first time, too
                self._apply_again(record)
            del self._events[before:]
        del self._events[before:]

    def _apply_again(self, record: Record) -> None:
        """Applies a record as it was applied the first time: if the rule failed at it, as a rejection."""
        head, rejected = json.loads(record.head), self._rejected.get(record.seq)
        if rejected is None:
            self._federation.apply(head, record.body)
        else:
            why, flush = rejected
            self._federation.reject(head, why, flush=flush)

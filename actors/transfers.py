"""Requests whose prompt one executor computes (P) and another decodes (D): which two, and what becomes of them.

Owns transfer ids and the record of each, from the two Joins until both slots are free. A transfer that fails before D
has activated it has sent no token: both rows go, and the request runs again on D alone. Where D was faster than our
word, its row stays and the transfer has not failed. It must not know pages, links or queues.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from epicycle.actors.control_messages import Admit

ID_BITS = 40  # of a transfer id; the control's epoch stands above, so that no id is ever used twice


@dataclass(slots=True)
class Transfer:
    """`source` and `target` are the epochs of P and D. Once D `is_activated` tokens flow and P doesn't matter."""

    id: int
    admit: Admit
    source: int
    target: int
    is_activated: bool = False
    is_withdrawn: bool = False  # D's Fin is the end, whatever fails from now on
    is_failed: bool = False  # both rows were told to go without a word
    has_left_source: bool = False  # P's slot is free
    has_left_target: bool = False  # D's is
    withdrawal: tuple[str, str] | None = None  # of a failed one: withdrawn meanwhile, for this reason and message

    @property
    def rid(self) -> int:
        return self.admit.submit.rid


class Transfers:
    """By id and by rid."""

    def __init__(self, control_epoch: int) -> None:
        self.opened = 0
        self.failures: Counter[str] = Counter()  # by code
        self._ids = itertools.count(control_epoch << ID_BITS | 1)
        self._by_id: dict[int, Transfer] = {}
        self._by_rid: dict[int, Transfer] = {}

    @property
    def in_flight(self) -> int:
        """Those that D has not activated."""
        return sum(not (transfer.is_activated or transfer.has_left_target) for transfer in self._by_id.values())

    def open(self, admit: Admit) -> Transfer:
        self.opened += 1
        transfer = Transfer(next(self._ids), admit, admit.source_epoch, admit.executor_epoch)
        self._by_id[transfer.id] = self._by_rid[transfer.rid] = transfer
        return transfer

    def find(self, transfer_id: int) -> Transfer | None:
        return self._by_id.get(transfer_id)

    def of(self, rid: int) -> Transfer | None:
        return self._by_rid.get(rid)

    def on(self, epoch: int) -> list[Transfer]:
        """Those with this executor on either side."""
        return [each for each in self._by_id.values() if epoch in (each.source, each.target)]

    def activate(self, rid: int) -> Transfer | None:
        """D runs the row; the transfer if it was thought to have failed."""
        transfer = self._by_rid.get(rid)
        if transfer is None:
            return None
        was_failed, transfer.is_failed, transfer.is_activated = transfer.is_failed, False, True
        return transfer if was_failed else None

    def fail(self, transfer: Transfer, code: str) -> bool:
        """The transfer can't be completed; whether that is news, and both rows must go."""
        if transfer.is_activated or transfer.is_withdrawn or transfer.is_failed or transfer.has_left_target:
            return False
        self.failures[code] += 1
        transfer.is_failed = True
        return True

    def withdraw(self, rid: int, reason: str, message: str) -> None:
        """The request is evicted; where its rows are on their way out already, that is its end, not another run."""
        transfer = self._by_rid.get(rid)
        if transfer is None:
            return
        if not transfer.is_failed:
            transfer.is_withdrawn = True
        elif transfer.withdrawal is None:
            transfer.withdrawal = (reason, message)

    def close(self, rid: int) -> None:
        """Neither executor holds anything of it, or it is about to run again."""
        transfer = self._by_rid.pop(rid, None)
        if transfer is not None:
            del self._by_id[transfer.id]

"""The transfer port: an executor's `Exchange` on a thread of its own, so that no transfer waits for a tick.

Owns that thread, what is said to it (commands run there, in order) and what it says (events, read by the pump). The
thread sleeps while nothing is under way, and looks often while something is: NIXL has no descriptor to wait for. It
must not know what the messages mean.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from epicycle.engine.transfer.connector import Connector, TransferError
from epicycle.engine.transfer.events import Event
from epicycle.engine.transfer.exchange import Exchange
from epicycle.engine.transfer.outgoing import Ready
from epicycle.engine.transfer.units import Unit
from epicycle.transport.config import TransferConfig
from epicycle.transport.doorbell import Doorbell, wait_readable
from epicycle.transport.link import Receiver, Sender
from epicycle.transport.wire.transfer import Export, Import, ToPeer

SENDING_S = 5e-5  # between two looks while writes are on their way
WAITING_S = 2e-4  # while others' writes are awaited
RETRY_S = 0.005  # while a link has refused something
IDLE_S = 0.25
JOIN_S = 5.0

Command = Callable[[Exchange], None]


class TransferPort:
    """Methods are for the executor's thread, except `turn`, which is for the port's or, without `start`, a test's.

    It is readable (`fileno`) while events wait for `take`.
    """

    def __init__(
        self,
        connector: Connector,
        name: str,
        epoch: int,
        receiver: Receiver[ToPeer],
        limits: TransferConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exchange = Exchange(connector, name, epoch, limits, clock)
        self._connector = connector
        self._receiver = receiver
        self._name = name
        self._commands: deque[Command] = deque()
        self._events: deque[Event] = deque()
        self._wake = Doorbell()
        self._bell = Doorbell()
        self._resets = self._quiet_resets = 0
        self._error: BaseException | None = None
        self.has_news = False  # something for `take`
        self._is_closing = False
        self._thread: threading.Thread | None = None

    # For the executor

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"{self._name} transfers", daemon=True)
        self._thread.start()

    def peer_up(self, name: str, epoch: int, sender: Sender) -> None:
        self._do(lambda exchange: exchange.peer_up(name, epoch, sender))

    def peer_down(self, name: str, epoch: int) -> None:
        self._do(lambda exchange: exchange.peer_down(name, epoch))

    @property
    def is_quiet(self) -> bool:
        """No transfer from before the last `reset` is left."""
        return self._resets == self._quiet_resets

    def fileno(self) -> int:
        return self._bell.fileno()

    def counters(self) -> dict[str, float]:
        """What a heartbeat shows; any thread."""
        counts, mine = self._exchange.counts, f'executor="{self._name}"'
        tails = sorted(counts.tails_s)
        found: dict[str, float] = {
            "transfer_sent_total": counts.sent,
            "transfer_received_total": counts.received,
            "transfer_sent_bytes_total": counts.sent_bytes,
            "transfer_early_bytes_total": counts.early_bytes,
            "transfer_writes_total": counts.writes,
            "transfer_blocks_total": counts.blocks,
            "transfer_segments_total": counts.segments,
            "transfer_inflight_bytes": counts.inflight_bytes,
            "transfer_tail_seconds_total": counts.tail_s,
            "transfer_tail_median_seconds": tails[len(tails) // 2] if tails else 0.0,
            "transfer_late_messages_total": counts.late_messages,
        }
        named = {f"{name}{{{mine}}}": value for name, value in found.items()}
        rates = counts.link_bytes_per_s
        return named | {f'transfer_link_bytes_per_second{{{mine},peer="{peer}"}}': rates[peer] for peer in list(rates)}

    def close(self) -> None:
        """End the thread and let go of the memory. Idempotent."""
        if self._is_closing:
            return
        self._is_closing = True
        self._wake.ring()
        if self._thread is not None:
            self._thread.join(JOIN_S)
        self._connector.close()
        self._receiver.close()

    # For the pump

    def expect(
        self, part: Import, prompt_tokens: int, first_token: int, pages: list[int], head_row: int, fence: Ready
    ) -> None:
        """See `Exchange.expect`."""
        self._do(lambda exchange: exchange.expect(part, prompt_tokens, first_token, pages, head_row, fence))

    def offer(self, part: Export, prompt_tokens: int, pages: list[int], head_row: int) -> None:
        """See `Exchange.offer`."""
        self._do(lambda exchange: exchange.offer(part, prompt_tokens, pages, head_row))

    def written(self, transfer: int, units: list[Unit], ready: Ready) -> None:
        """See `Exchange.written`."""
        self._do(lambda exchange: exchange.written(transfer, units, ready))

    @property
    def planes(self) -> range:
        return range(len(self._connector.blocks.shape.planes))

    def done_after(self, loops_done: int) -> list[int]:
        """The planes that are final once so many loops of a chunk have run, and were not a loop earlier."""
        done_at = self._connector.blocks.shape.done_at
        return [plane for plane in self.planes if done_at[plane] + 1 == loops_done]

    def stop(self, transfer: int) -> None:
        """See `Exchange.stop`."""
        self._do(lambda exchange: exchange.stop(transfer))

    def reset(self) -> None:
        """Stop everything; `is_quiet` says when nothing is left of it."""
        self._resets += 1
        self._do(lambda exchange: exchange.stop_all())

    def take(self) -> list[Event]:
        """What has happened since the last call. Raises TransferError where the port's thread has failed."""
        if self._error is not None:
            raise TransferError("transfer_error", f"the transfer thread has failed: {self._error!r}") from self._error
        found: list[Event] = []
        if not self.has_news:
            return found
        self.has_news = False
        self._bell.silence()
        while self._events:
            found.append(self._events.popleft())
        return found

    def _do(self, command: Command) -> None:
        self._commands.append(command)
        self._wake.ring()

    # On the port's thread

    def turn(self) -> None:
        """One round of commands, messages and writes; never waits."""
        exchange, resets = self._exchange, self._resets
        while self._commands:
            self._commands.popleft()(exchange)
        for message in self._receiver.drain():
            exchange.receive(message)
        exchange.turn()
        if exchange.events:
            self._events.extend(exchange.events)
            exchange.events.clear()
            self._ring()
        if self._quiet_resets != resets and not exchange.has_transfers and not self._commands:
            self._quiet_resets = resets
            self._ring()

    def _ring(self) -> None:
        self.has_news = True
        self._bell.ring()

    def _run(self) -> None:
        try:
            self._connector.enter()
            while not self._is_closing:
                self._wake.silence()
                self.turn()
                self._pause()
        except BaseException as error:  # the pump raises it where the executor can see it
            self._error = error
            self._ring()

    def _pause(self) -> None:
        exchange = self._exchange
        if exchange.is_sending:
            time.sleep(SENDING_S)
        elif exchange.has_transfers:
            time.sleep(WAITING_S)
        else:
            wait_readable((self._wake, self._receiver), RETRY_S if exchange.has_unsent else IDLE_S)

"""The protocol of `transport/wire/transfer.py`, as one executor speaks it: transfers in, transfers out, and peers.

Owns every transfer that this executor takes part in and the order of its messages; `Peers` knows who is up. Runs on
one thread, in turns that never wait; `port.py` gives it that thread. Which side of a transfer an executor is on follows
from the Join alone. It must not know pumps, slots' owners, or how a connector moves bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from epicycle.engine.errors import OptionError
from epicycle.engine.transfer.blocks import Blocks
from epicycle.engine.transfer.connector import Connector, TransferError
from epicycle.engine.transfer.coverage import Coverage, CoverageError
from epicycle.engine.transfer.events import MOST_TAILS, Ended, Event, Failed, Landed, TransferCounts
from epicycle.engine.transfer.outgoing import Outgoing, Posted, Ready
from epicycle.engine.transfer.peers import Peer, Peers
from epicycle.engine.transfer.probe import PROBE
from epicycle.engine.transfer.units import Cut, Unit, pairs, runs_of, segments
from epicycle.transport.codec import Decoder, encode
from epicycle.transport.config import TransferConfig
from epicycle.transport.errors import WireError
from epicycle.transport.link import Sender
from epicycle.transport.wire.columns import I32, pack
from epicycle.transport.wire.transfer import (
    Ack,
    Arrived,
    Commit,
    Export,
    Import,
    Meet,
    Reserved,
    StopWrites,
    ToPeer,
    WritesEnded,
)


@dataclass(slots=True, kw_only=True)
class _Incoming:
    transfer: int
    source: str
    source_epoch: int
    cut: Cut
    pages: list[int]
    head_row: int
    fence: Ready
    coverage: Coverage
    commit: Commit | None = None
    is_reserved: bool = False
    is_failed: bool = False
    is_over: bool = False  # no write follows
    is_unwanted: bool = False  # the pump waits for the end
    is_told: bool = False  # P has been asked to stop


class Exchange:
    """`events` collects what the pump must hear. Raises OptionError where the largest unit is over the chunk limit."""

    def __init__(
        self, connector: Connector, name: str, epoch: int, limits: TransferConfig, clock: Callable[[], float]
    ) -> None:
        largest = connector.blocks.shape.largest_unit_bytes
        if largest > limits.chunk_bytes:
            raise OptionError(
                "bad_option",
                f"transfer.chunk_bytes is {limits.chunk_bytes}; one page of one plane takes {largest}, "
                "and no less can be sent: raise it, or lower engine.page_tokens",
            )
        self.events: list[Event] = []
        self.counts = TransferCounts()
        self._connector = connector
        self._name = name
        self._epoch = epoch
        self._limits = limits
        self._clock = clock
        self._peers = Peers(connector, name, epoch, self.counts)
        self._reserved: dict[int, Reserved] = {}  # came before P's Join
        self._in: dict[int, _Incoming] = {}
        self._out: dict[int, Outgoing] = {}
        self._arrived: Decoder[Arrived] = Decoder(Arrived)

    @property
    def has_unsent(self) -> bool:
        return any(len(peer.outbox) for peer in self._peers)

    @property
    def has_transfers(self) -> bool:
        return bool(self._in or self._out)

    @property
    def is_sending(self) -> bool:
        """Something may be posted or done at any moment."""
        return any(out.is_under_way for out in self._out.values())

    # Peers

    def peer_up(self, name: str, epoch: int, sender: Sender) -> None:
        earlier = self._peers.find(name)
        if earlier is not None:
            self.peer_down(name, earlier.epoch)
        self._peers.up(name, epoch, sender)

    def peer_down(self, name: str, epoch: int) -> None:
        """Its writes have ended with it, and what it shared with us will not be completed."""
        gone = {number for number, held in self._reserved.items() if held.name == name and held.epoch <= epoch}
        for number in gone:
            del self._reserved[number]
        for out in self._out.values():
            if out.target == name and out.target_epoch <= epoch:
                self._release_all(out)
                self._fail_out(out, "peer_down", f"{name} is down")
        for into in self._in.values():
            if into.source == name and into.source_epoch <= epoch:
                into.is_over = True
                self._fail_in(into, "peer_down", f"{name} is down")
        self._peers.down(name, epoch)

    # What the pump says

    def expect(
        self, part: Import, prompt_tokens: int, first_token: int, pages: list[int], head_row: int, fence: Ready
    ) -> None:
        """D: a row waits for its prompt from `first_token` on, into `pages`; reserve once `fence` is passed."""
        cut = Cut(self._connector.blocks.shape, first_token // self._connector.blocks.shape.page_tokens, prompt_tokens)
        into = _Incoming(
            transfer=part.transfer,
            source=part.source,
            source_epoch=part.source_epoch,
            cut=cut,
            pages=pages,
            head_row=head_row,
            fence=fence,
            coverage=Coverage(cut),
        )
        self._in[part.transfer] = into
        if self._peers.is_gone(into.source, into.source_epoch):
            into.is_over = True
            self._fail_in(into, "peer_down", f"{into.source} is down")

    def offer(self, part: Export, prompt_tokens: int, pages: list[int], head_row: int) -> None:
        """P: a row's prompt will be written to D."""
        out = Outgoing(
            transfer=part.transfer,
            target=part.target,
            target_epoch=part.target_epoch,
            shape=self._connector.blocks.shape,
            prompt_tokens=prompt_tokens,
            pages=pages,
            head_row=head_row,
            moved_s=self._clock(),
        )
        self._out[part.transfer] = out
        reserved = self._reserved.pop(part.transfer, None)
        if reserved is not None:
            out.reserve(reserved)
        if self._peers.is_gone(out.target, out.target_epoch):
            self._fail_out(out, "peer_down", f"{out.target} is down")

    def written(self, transfer: int, units: list[Unit], ready: Ready) -> None:
        """P: `units` hold what D needs once `ready`."""
        out = self._out.get(transfer)
        if out is not None and not out.is_stopped:
            out.gates.append((ready, units))

    def stop(self, transfer: int) -> None:
        """The pump's row is gone: Ended follows once no write touches its pages."""
        out, into = self._out.get(transfer), self._in.get(transfer)
        if out is not None:
            out.is_unwanted = True
            out.stop()
        if into is not None:
            into.is_unwanted = True
            into.is_over |= not into.is_reserved
        if out is None and into is None:  # it has ended or landed meanwhile
            self.events.append(Ended(transfer))

    def stop_all(self) -> None:
        for transfer in [*self._in, *self._out]:
            self.stop(transfer)

    # What peers say

    def receive(self, message: ToPeer) -> None:
        match message:
            case Meet():
                self._peers.meet(message)
            case Reserved(transfer=transfer):
                self._take_reserved(transfer, message)
            case Commit(transfer=transfer) if transfer in self._in:
                self._in[transfer].commit = message
            case Ack(transfer=transfer) if transfer in self._out:
                self._take_ack(self._out[transfer])
            case StopWrites(transfer=transfer, name=name):
                self._take_stop(transfer, name)
            case WritesEnded(transfer=transfer, code=code, message=text) if transfer in self._in:
                into = self._in[transfer]
                into.is_over = True
                if code:
                    self._fail_in(into, code, text)
            case _:
                self.counts.late_messages += 1

    def _take_reserved(self, transfer: int, reserved: Reserved) -> None:
        out = self._out.get(transfer)
        if out is None:
            if not self._peers.is_gone(reserved.name, reserved.epoch):
                self._reserved[transfer] = reserved
        elif reserved.prompt_tokens != out.prompt_tokens:
            out.reserve(reserved)
            self._fail_out(out, "bad_coverage", f"D expects {reserved.prompt_tokens} tokens, P has {out.prompt_tokens}")
        else:
            out.reserve(reserved)

    def _take_ack(self, out: Outgoing) -> None:
        out.is_acked = True
        self.counts.sent += 1
        if out.prompt_done_s is not None:
            tail_s = self._clock() - out.prompt_done_s
            self.counts.tail_s += tail_s
            self.counts.tails_s = [*self.counts.tails_s[1 - MOST_TAILS :], tail_s]

    def _take_stop(self, transfer: int, name: str) -> None:
        out, peer = self._out.get(transfer), self._peers.find(name)
        self._reserved.pop(transfer, None)
        if out is not None:
            out.stop()
        elif peer is not None:
            peer.send(WritesEnded(transfer))

    # Turns

    def turn(self) -> None:
        """Whatever can be done now."""
        for tag in self._connector.arrived():
            self._take_arrived(tag)
        for into in list(self._in.values()):
            self._turn_in(into)
        for out in list(self._out.values()):
            self._turn_out(out)
        for peer in self._peers:
            peer.outbox.flush()

    def _take_arrived(self, tag: bytes) -> None:
        try:
            arrived = self._arrived(tag)
        except WireError:
            self.counts.late_messages += 1
            return
        if arrived.transfer == PROBE:
            return
        into = self._in.get(arrived.transfer)
        if into is None or into.is_failed or into.is_unwanted:
            self.counts.late_messages += 1
            return
        try:
            into.coverage.mark(arrived)
        except CoverageError as error:
            self._fail_in(into, "bad_coverage", str(error))

    def _turn_in(self, into: _Incoming) -> None:
        peer = self._peers.find(into.source, into.source_epoch)
        if not into.is_reserved and not into.is_over and peer is not None and into.fence():
            into.is_reserved = True
            peer.send(
                Reserved(
                    self._name,
                    self._epoch,
                    into.transfer,
                    into.cut.prompt_tokens,
                    into.cut.first_page * into.cut.shape.page_tokens,
                    pack(I32, into.pages),
                    into.head_row,
                )
            )
        if (into.is_unwanted or into.is_failed) and not into.is_over and not into.is_told and peer is not None:
            into.is_told = True
            peer.send(StopWrites(into.transfer, self._name))
        if into.is_unwanted and into.is_over:
            del self._in[into.transfer]
            self.events.append(Ended(into.transfer))
        elif into.commit is not None and not into.is_failed and not into.is_unwanted and peer is not None:
            self._try_landing(into, into.commit, peer)

    def _try_landing(self, into: _Incoming, commit: Commit, peer: Peer) -> None:
        try:
            if not into.coverage.is_complete(commit):
                return
        except CoverageError as error:
            self._fail_in(into, "bad_coverage", str(error))
            return
        del self._in[into.transfer]
        self.counts.received += 1
        self.events.append(Landed(into.transfer))
        peer.send(Ack(into.transfer))

    def _turn_out(self, out: Outgoing) -> None:
        if out.is_waiting:
            return
        now_s, peer = self._clock(), self._peers.find(out.target, out.target_epoch)
        out.open_gates(now_s)
        self._poll(out, now_s)
        if peer is not None and peer.error is not None:
            self._fail_out(out, peer.error.code, str(peer.error))
        if not out.is_stopped and out.reserved is not None and peer is not None and peer.blocks is not None:
            self._post(out, peer, peer.blocks, now_s)
            if not out.unsent and not out.is_committed and not out.is_stopped:
                out.is_committed = True
                peer.send(Commit(out.transfer, out.parts, out.bytes))
        if (out.posted or out.is_committed) and not out.is_acked and now_s - out.moved_s > self._limits.idle_s:
            text = f"nothing has moved for {self._limits.idle_s} s (transfer.idle_s)"
            self._fail_out(out, "transfer_idle", text)
        self._end_out(out, peer)

    def _end_out(self, out: Outgoing, peer: Peer | None) -> None:
        if out.posted:
            return
        if out.is_stopped and not out.is_acked and not out.is_told and out.reserved is not None and peer is not None:
            out.is_told = True
            peer.send(WritesEnded(out.transfer, *out.failure))
        if out.is_unwanted or out.is_acked:
            del self._out[out.transfer]
            self.events.append(Ended(out.transfer))

    def _poll(self, out: Outgoing, now_s: float) -> None:
        left: list[Posted] = []
        for posted in out.posted:
            try:
                is_done = posted.write.is_done()
            except TransferError as error:
                self._fail_out(out, error.code, str(error))
                is_done = True
            if is_done:
                self._release(posted)
                out.moved_s = now_s
            else:
                left.append(posted)
        out.posted = left

    def _release(self, posted: Posted) -> None:
        posted.write.release()
        self.counts.inflight_bytes -= posted.bytes

    def _release_all(self, out: Outgoing) -> None:
        for posted in out.posted:
            self._release(posted)
        out.posted = []

    def _post(self, out: Outgoing, peer: Peer, there: Blocks, now_s: float) -> None:
        """Writes of what is ready, as far as both limits allow."""
        counts, limits = self.counts, self._limits
        while out.ready:
            if limits.inflight_bytes - counts.inflight_bytes < limits.chunk_bytes:
                return  # a smaller write now would be one more later
            units, size = out.take(limits.chunk_bytes)
            if not units:
                return
            here_place, there_place = out.places(self._connector.blocks, there)
            source, target = pairs(out.cut, units, here_place, there_place)
            tag = encode(Arrived(out.transfer, out.parts, runs_of(units)))
            try:
                write = self._connector.write(peer.name, source, target, tag)
            except TransferError as error:
                self._fail_out(out, error.code, str(error))
                return
            out.posted.append(Posted(write, size))
            out.parts += 1
            out.bytes += size
            out.moved_s = now_s
            counts.writes += 1
            counts.sent_bytes += size
            counts.early_bytes += size if out.prompt_done_s is None else 0
            counts.inflight_bytes += size
            counts.blocks += len(source)
            counts.segments += len(segments(source, target, self._connector.blocks, there)[0])

    # Failures

    def _fail_out(self, out: Outgoing, code: str, message: str) -> None:
        if out.is_acked or out.failure[0]:
            return
        out.failure = (code, message)
        out.stop()
        self._tell_failure(out.transfer, code, message, is_unwanted=out.is_unwanted)

    def _fail_in(self, into: _Incoming, code: str, message: str) -> None:
        if into.is_failed:
            return
        into.is_failed = True
        self._tell_failure(into.transfer, code, message, is_unwanted=into.is_unwanted)

    def _tell_failure(self, transfer: int, code: str, message: str, *, is_unwanted: bool) -> None:
        if not is_unwanted:
            self.counts.failed += 1
            self.events.append(Failed(transfer, code, message))

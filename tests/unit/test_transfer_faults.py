"""Transfers that don't come to their end: cancelled at every stage, failed by a connector, left by a peer, reset.

Whatever happens, every page and slot comes back on both sides, and not before the other side has stopped writing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest

from epicycle.engine.engine import Engine
from epicycle.engine.errors import OptionError
from epicycle.engine.transfer.blocks import Numbers
from epicycle.engine.transfer.connector import TransferError, Write
from epicycle.engine.transfer.copying import CopyConnector
from epicycle.engine.transfer.memory import Memory
from epicycle.engine.transfer.probe import PROBE
from epicycle.transport.codec import Decoder
from epicycle.transport.config import TransferConfig
from epicycle.transport.wire.request import LoopBounds, Sampling
from epicycle.transport.wire.transfer import Ack, Arrived, Commit, Import, Reserved, StopWrites, WritesEnded
from tests.fakes.serving import Ask, Outcome, serve_all, tiny_engine, tiny_folder
from tests.fakes.split import LIMITS, Split

GREEDY = Sampling(max_tokens=5, temperature=0.0, logprobs=1)
PROMPT = [(7 * place + 3) % 61 for place in range(21)]
ASK = Ask(PROMPT, GREEDY, LoopBounds())
MOST_STEPS = 60


@dataclass
class HeldWrite:
    """A write that moves nothing, and isn't done, until its connector lets it."""

    connector: HeldConnector
    copy: Callable[[], Write]
    is_counted: bool
    is_copied: bool = False

    def is_done(self) -> bool:
        if self.connector.error is not None:
            raise self.connector.error
        if not self.connector.is_holding and not self.is_copied:
            self.copy()
            self.is_copied = True
        return self.is_copied

    def release(self) -> None:
        self.connector.released += self.is_counted


@dataclass
class HeldConnector(CopyConnector):
    """A copy connector whose writes a test can hold back, or fail."""

    memory: Memory
    is_holding: bool = False
    error: TransferError | None = None
    released: int = 0
    written: int = field(default=0)

    def __post_init__(self) -> None:
        super().__init__(self.memory)

    def write(self, peer: str, source: Numbers, target: Numbers, tag: bytes) -> Write:
        is_counted = Decoder(Arrived)(tag).transfer != PROBE
        self.written += is_counted
        return HeldWrite(self, partial(super().write, peer, source, target, tag), is_counted)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine]:
    folder = tiny_folder(tmp_path_factory.mktemp("models"), "ouro")
    return tiny_engine(folder, poison=True), tiny_engine(folder, poison=True)


@pytest.fixture
def held(engines: tuple[Engine, Engine]) -> HeldConnector:
    return HeldConnector(Memory.of(engines[0].pool, engines[0].heads))


def bits_of(split: Split, rid: int) -> tuple[object, ...]:
    return split.d.outcomes[rid].bits


def serves_again(split: Split) -> None:
    """A request goes through, with the bits of one executor alone, and leaves nothing behind."""
    rid = split.submit(ASK)
    split.run()
    [expected] = serve_all(split.d.engine, [ASK])
    assert expected.bits == bits_of(split, rid)


class TestCancels:
    @pytest.mark.parametrize("steps", range(0, 24, 1))
    def test_after_any_number_of_steps(self, engines: tuple[Engine, Engine], steps: int) -> None:
        split = Split(*engines)
        rid = split.submit(ASK)
        split.admit()
        for _ in range(steps):
            split.step()
        split.evict(rid)
        split.run()
        assert split.d.outcomes[rid].reason in ("cancelled", "length")
        serves_again(split)

    def test_pages_come_back_only_when_writes_have_ended(
        self, engines: tuple[Engine, Engine], held: HeldConnector
    ) -> None:
        split = Split(*engines, connectors=(held, None))
        held.is_holding = True
        rid = split.submit(ASK)
        while not held.written:
            split.step()
        split.evict(rid)
        for _ in range(MOST_STEPS):
            split.step()
        assert "cancelled" == split.d.outcomes[rid].reason
        assert not split.p.is_even
        assert not split.d.is_even
        held.is_holding = False
        split.run()
        assert held.written == held.released
        serves_again(split)

    def test_by_one_side_first(self, engines: tuple[Engine, Engine], held: HeldConnector) -> None:
        for first, second in (("p", "d"), ("d", "p")):
            split = Split(*engines)
            rid = split.submit(ASK)
            split.step()
            for name in (first, second):
                getattr(split, name).evict(rid)
                for _ in range(MOST_STEPS):
                    split.step()
            assert split.is_even
            assert "cancelled" == split.d.outcomes[rid].reason

    def test_a_silent_evict_says_nothing(self, engines: tuple[Engine, Engine]) -> None:
        split = Split(*engines)
        rid = split.submit(ASK)
        split.step()
        split.evict(rid, is_silent=True)
        for _ in range(MOST_STEPS):
            split.step()
        assert split.is_even
        assert ("", []) == (split.d.outcomes[rid].reason, split.d.outcomes[rid].tokens)

    @pytest.mark.parametrize("steps", range(0, 24, 2))
    def test_a_silent_evict_spares_a_row_that_has_its_prompt(self, engines: tuple[Engine, Engine], steps: int) -> None:
        """Whenever it comes, nothing or the whole answer was said: so control may run a request again that went."""
        split = Split(*engines)
        rid = split.submit(ASK)
        split.admit()
        for _ in range(steps):
            split.step()
        split.evict(rid, is_silent=True)
        for _ in range(MOST_STEPS):
            split.step()
        assert split.is_even
        [expected] = serve_all(split.d.engine, [ASK])
        assert bits_of(split, rid) in (expected.bits, Outcome().bits)


class TestFailures:
    def test_of_a_write_are_told_by_both_sides(self, engines: tuple[Engine, Engine], held: HeldConnector) -> None:
        split = Split(*engines, connectors=(held, None))
        held.error = TransferError("transfer_error", "broken by the test")
        rid = split.submit(ASK)
        for _ in range(MOST_STEPS):
            split.step()
        number = split.transfers[rid]
        for side in (split.p, split.d):
            assert [(number, "transfer_error", "broken by the test")] == [
                (failure.transfer, failure.code, failure.message) for failure in side.failed
            ]
        assert not split.d.is_even, "rows stay until control has decided"
        split.evict(rid, is_silent=True)
        for _ in range(MOST_STEPS):
            split.step()
        assert split.is_even
        held.error = None
        del split.d.outcomes[rid]
        serves_again(split)

    def test_a_transfer_that_stands_still(self, engines: tuple[Engine, Engine], held: HeldConnector) -> None:
        split = Split(*engines, connectors=(held, None))
        held.is_holding = True
        rid = split.submit(ASK)
        for _ in range(MOST_STEPS):
            split.step()
        split.clock.advance(LIMITS.idle_s + 1)
        split.step()
        split.step()
        assert ["transfer_idle"] == [failure.code for failure in split.p.failed]
        assert [] == split.d.failed, "P may still write"
        held.is_holding = False
        split.step()
        split.step()
        assert ["transfer_idle"] == [failure.code for failure in split.d.failed]
        split.evict(rid)
        split.run()

    def test_parts_that_do_not_add_up(self, engines: tuple[Engine, Engine], held: HeldConnector) -> None:
        split = Split(*engines, connectors=(held, None))
        rid = split.submit(ASK)
        number = 1
        while not held.written:
            split.step()
        split.p.send_to(split.d, Commit(number, parts=1, bytes=1))
        for _ in range(MOST_STEPS):
            split.step()
        assert ["bad_coverage"] == [failure.code for failure in split.d.failed]
        split.evict(rid)
        split.run()
        serves_again(split)


class TestDeaths:
    @pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 11, 14])
    def test_of_p(self, engines: tuple[Engine, Engine], steps: int) -> None:
        """D keeps its rows that run, fails those that wait, and takes prompts from the next P."""
        split = Split(*engines)
        rid = split.submit(ASK)
        split.admit()
        for _ in range(steps):
            split.step()
        split.kill("p")
        for _ in range(MOST_STEPS):
            split.d.turn()
        if not split.d.outcomes[rid].tokens:
            assert ["peer_down"] == [failure.code for failure in split.d.failed]
            split.d.evict(rid)
        for _ in range(MOST_STEPS):
            split.d.turn()
        assert split.d.is_even
        split.replace("p")
        serves_again(split)

    @pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 11, 14])
    def test_of_d(self, engines: tuple[Engine, Engine], steps: int) -> None:
        split = Split(*engines)
        rid = split.submit(ASK)
        split.admit()
        for _ in range(steps):
            split.step()
        split.kill("d")
        for _ in range(MOST_STEPS):
            split.p.turn()
        if rid in split.p.held:
            assert ["peer_down"] == [failure.code for failure in split.p.failed]
            split.p.evict(rid)
        for _ in range(MOST_STEPS):
            split.p.turn()
        assert split.p.is_even
        split.replace("d")
        serves_again(split)

    def test_joins_for_an_incarnation_that_is_gone(self, engines: tuple[Engine, Engine]) -> None:
        split = Split(*engines)
        split.kill("p")
        split.replace("p")
        split.d.port.peer_down("ex0", 1)
        split.d.port.expect(Import(99, "ex0", 1), 5, 0, [0, 1], 0, lambda: True)
        split.d.port.turn()
        [event] = split.d.port.take()
        assert (99, "peer_down") == (event.transfer, getattr(event, "code", ""))


class TestResets:
    @pytest.mark.parametrize("steps", [0, 2, 5, 9, 13])
    def test_a_new_control_waits_for_writes_of_the_old_one(
        self, engines: tuple[Engine, Engine], held: HeldConnector, steps: int
    ) -> None:
        split = Split(*engines, connectors=(held, None))
        split.submit(ASK)
        split.admit()
        for _ in range(steps):
            split.step()
        held.is_holding = True
        for side in (split.p, split.d):
            side.reset()
        for _ in range(MOST_STEPS):
            split.step()
        if held.written > held.released:
            assert not split.p.port.is_quiet
        held.is_holding = False
        for _ in range(MOST_STEPS):
            split.step()
        assert split.p.port.is_quiet
        assert split.d.port.is_quiet
        serves_again(split)


class TestMessages:
    def test_late_ones_change_nothing(self, engines: tuple[Engine, Engine]) -> None:
        split = Split(*engines)
        rid = split.submit(ASK)
        split.run()
        number = split.transfers[rid]
        for message in (Ack(number), Commit(number, 1, 1), WritesEnded(number, "transfer_error", "late")):
            split.p.send_to(split.d, message)
            split.d.send_to(split.p, message)
        split.d.send_to(split.p, StopWrites(number, "ex1"))
        for _ in range(5):
            split.step()
        assert [] == split.p.failed + split.d.failed
        serves_again(split)

    def test_a_reservation_for_another_prompt_is_refused(self, engines: tuple[Engine, Engine]) -> None:
        split = Split(*engines)
        rid = split.submit(ASK)
        split.admit()
        split.d.send_to(split.p, Reserved("ex1", 1, 1, len(PROMPT) + 1, 0, b"", 0))
        for _ in range(MOST_STEPS):
            split.step()
        assert ["bad_coverage"] == [failure.code for failure in split.p.failed]
        split.evict(rid)
        split.run()


def test_a_chunk_below_one_unit_is_refused(engines: tuple[Engine, Engine]) -> None:
    with pytest.raises(OptionError, match="chunk_bytes is 64"):
        Split(*engines, limits=TransferConfig(connector="copy", chunk_bytes=64))


def test_what_a_peer_sends_is_checked_before_it_is_believed(engines: tuple[Engine, Engine]) -> None:
    split = Split(*engines)
    split.p.connector._arrived.append(b"junk")
    split.step()
    assert 1 == split.p.port.counters()['transfer_late_messages_total{executor="ex0"}']

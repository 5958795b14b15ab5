"""The supervisor's table: who learns of whom, what counts as a hang, and the view of health made from it."""

from __future__ import annotations

import os

import msgspec
import pytest

from epicycle.actors.health_view import Pinged, view
from epicycle.actors.host import LOOP_LAG
from epicycle.actors.mock_model import mock_capabilities
from epicycle.actors.peers import Peer, Peers
from epicycle.actors.restarts import RestartBudget
from epicycle.transport.config import Config, SupervisorConfig
from epicycle.transport.wire.control import (
    Beat,
    Endpoint,
    Fatal,
    FromSupervisor,
    HealthReply,
    Hello,
    MailboxStat,
    PeerDown,
    PeerUp,
    Pong,
    Ready,
)
from epicycle.transport.wire.transfer import TransferFacts

KINDS = {"ex0": "executor", "control": "control", "gw0": "gateway", "gw1": "gateway"}
CONFIG = SupervisorConfig()


class Table:
    """Peers with what it sent, and every child started at time 0."""

    KINDS = KINDS

    def __init__(self) -> None:
        self.sent: list[tuple[str, FromSupervisor]] = []
        self.peers = Peers(self.KINDS, lambda name, message: self.sent.append((name, message)))
        for name in self.KINDS:
            self.peers.start(name, 0.0)

    def ready(self, *names: str, at_s: float = 0.0) -> None:
        for name in names:
            self.peers.hear(Ready(name, self[name].epoch, [Endpoint("any", f"ipc:///{name}")]), at_s)
            self.beat(name, at_s=at_s)

    def beat(self, name: str, at_s: float, pending: int = 0, progress: int = 0, lag_s: float = 0.0) -> None:
        beat = Beat(name, self[name].epoch, "ready", progress, pending, counters={LOOP_LAG: lag_s})
        self.peers.hear(beat, at_s)

    def view(self, at_s: float = 0.0, state: str = "running", pinged: Pinged | None = None) -> HealthReply:
        return view(self.peers, CONFIG, state, at_s, 7, pinged)

    def __getitem__(self, name: str) -> Peer:
        return self.peers.by_name[name]


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
def running(table: Table) -> Table:
    table.ready(*KINDS)
    table.sent.clear()
    return table


def test_children_meet_when_both_are_ready(table: Table) -> None:
    table.ready("gw0")

    assert [] == table.sent

    table.ready("ex0")

    assert [
        ("ex0", PeerUp("gw0", 1, [Endpoint("any", "ipc:///gw0")])),
        ("gw0", PeerUp("ex0", 1, [Endpoint("any", "ipc:///ex0")])),
    ] == table.sent


def test_gateways_never_meet_each_other(table: Table) -> None:
    table.ready("gw0", "gw1")

    assert [] == table.sent


def test_the_end_of_a_child_is_told_to_its_partners_at_work(running: Table) -> None:
    running.peers.bury("gw1", "killed by SIGKILL", 1.0)

    down = PeerDown("gw1", 1, "killed by SIGKILL")
    assert [("ex0", down), ("control", down)] == running.sent


def test_the_end_of_a_child_nobody_met_is_not_told(table: Table) -> None:
    table.ready("control")
    table.peers.bury("ex0", "exited with status 1", 1.0)

    assert [] == table.sent


def test_the_end_of_a_child_is_not_told_to_partners_that_leave_too(running: Table) -> None:
    running.peers.bury("ex0", "exited with status 0", 1.0, is_told=False)

    assert [] == running.sent


def test_a_fatal_child_is_still_taken_from_its_partners(running: Table) -> None:
    running.peers.hear(Fatal("ex0", 1, "nan", "logits are NaN"), 1.0)
    running.peers.bury("ex0", "exited with status 70", 1.1)

    assert {"control", "gw0", "gw1"} == {name for name, _ in running.sent}
    assert "nan: logits are NaN" == running["ex0"].last_error


def test_words_of_an_earlier_incarnation_are_dropped_and_counted(running: Table) -> None:
    running.peers.bury("ex0", "gone", 1.0)
    running.peers.start("ex0", 1.0)
    running.sent.clear()
    running.peers.hear(Ready("ex0", 1), 1.1)

    assert [] == running.sent
    assert (1, "restarting") == (running.peers.stale_messages, running["ex0"].state)


def test_words_of_a_stranger_are_dropped_and_counted(running: Table) -> None:
    running.peers.hear(Hello("ex9", 1, "n", 1, 1), 1.0)

    assert 1 == running.peers.stale_messages


@pytest.mark.parametrize(
    ("pending", "progress", "lag_s", "now_s", "expected"),
    [
        (0, 0, 0.0, 2.9, ""),
        (0, 0, 0.0, 3.1, "no heartbeat for 3.1 s"),
        (0, 0, 5.0, 0.1, "its loop has not turned for 5.1 s"),
    ],
)
def test_silence_and_a_wedged_loop_are_hangs(
    running: Table, pending: int, progress: int, lag_s: float, now_s: float, expected: str
) -> None:
    running.beat("ex0", 0.0, pending, progress, lag_s)

    assert expected == running["ex0"].hang(CONFIG, now_s).partition(" (")[0]


def test_pending_work_without_progress_is_a_hang_and_progress_ends_it(running: Table) -> None:
    for tenth in range(36):
        running.beat("ex0", tenth / 10, pending=2, progress=1)

    assert "2 pending and no progress for 3.5 s" in running["ex0"].hang(CONFIG, 3.5)
    assert 3.5 == running["ex0"].hung_for_s(CONFIG, 3.5)

    running.beat("ex0", 3.6, pending=2, progress=2)

    assert "" == running["ex0"].hang(CONFIG, 3.6)


def test_a_wedged_loop_has_hung_since_it_last_turned(running: Table) -> None:
    running.beat("gw0", 9.0, lag_s=8.5)

    assert 9.5 == running["gw0"].hung_for_s(CONFIG, 10.0)


def test_an_idle_child_never_hangs(running: Table) -> None:
    for second in range(100):
        running.beat("ex0", float(second))

    assert "" == running["ex0"].hang(CONFIG, 100.0)


def test_loading_is_never_a_hang(table: Table) -> None:
    table.peers.hear(Beat("ex0", 1, "loading"), 0.0)

    assert "" == table["ex0"].hang(CONFIG, 500.0)


def test_time_the_supervisor_slept_through_counts_against_nobody(running: Table) -> None:
    running.peers.forgive(60.0)

    assert "" == running["ex0"].hang(CONFIG, 61.0)


def test_health_is_healthy_when_all_are_ready_even_with_full_mailboxes(running: Table) -> None:
    mailboxes = [MailboxStat("submit", 1024, 99)]
    running.peers.hear(Beat("control", 1, "ready", progress=5, pending=1024, mailboxes=mailboxes), 1.0)
    reply = running.view(1.1)

    assert ("healthy", [], 7) == (reply.status, reply.problems, reply.ref)
    assert (1024, 1024, 99) == (
        reply.actors[1].in_flight,
        reply.actors[1].mailbox_depth,
        reply.actors[1].mailbox_rejected,
    )


@pytest.mark.parametrize(
    ("state", "expected"), [("starting", "degraded"), ("draining", "degraded"), ("stopped", "dead")]
)
def test_an_instance_that_does_not_run_is_not_healthy(running: Table, state: str, expected: str) -> None:
    reply = running.view(state=state)

    assert (expected, [f"the instance is {state}"]) == (reply.status, reply.problems)


def test_a_restarting_child_is_degraded_and_the_cause_is_told(running: Table) -> None:
    running.peers.bury("ex0", "killed by SIGSEGV", 1.0)
    running.peers.start("ex0", 1.0)
    reply = running.view(1.5)

    assert ("degraded", ["ex0 (epoch 2) is restarting: killed by SIGSEGV"]) == (reply.status, reply.problems)


def test_a_child_that_will_not_come_back_is_dead(running: Table) -> None:
    running.peers.bury("ex0", "killed by SIGSEGV", 1.0)

    assert "dead" == running.view(1.5, state="draining").status


def test_a_child_between_its_last_words_and_its_end_is_degraded(running: Table) -> None:
    running.peers.hear(Fatal("ex0", 1, "nan", "logits are NaN"), 1.0)

    assert ("degraded", ["ex0 (epoch 1) is failed: nan: logits are NaN"]) == (
        running.view(1.1).status,
        running.view(1.1).problems,
    )


def test_hops_are_told_for_the_asked_round_only(running: Table) -> None:
    for name in KINDS:
        running.peers.hear_pong(Pong(3, name), 1.25)
    running.peers.hear_pong(Pong(2, "gw1"), 1.5)
    reply = running.view(2.0, pinged=Pinged(3, 1.0))

    assert [250.0, 250.0, 250.0, -1.0, 0.0] == [actor.hop_ms for actor in reply.actors]
    assert ["gw1 did not answer a ping through its mailbox in 1000 ms"] == reply.problems


def test_the_supervisor_tells_of_itself_last(running: Table) -> None:
    row = running.view(2.0).actors[-1]

    assert ("supervisor", os.getpid(), "ready", 0) == (row.name, row.pid, row.state, row.restarts)
    assert 0 < row.rss_bytes


class Split(Table):
    """Two executors that compute prompts, one that decodes."""

    KINDS = {"ex0": "prefill", "ex1": "prefill", "ex2": "decode", "control": "control", "gw0": "gateway"}

    def offer(self, name: str, **facts: str) -> None:
        """Ready with these facts about transfers, the others being what all have."""
        same = dict.fromkeys(TransferFacts.__struct_fields__, "same")
        transfer = TransferFacts(**(same | facts)) if facts.get("connector") != "" else None
        capabilities = msgspec.structs.replace(mock_capabilities(Config()), transfer=transfer)
        self.peers.hear(Ready(name, self[name].epoch, [], capabilities), 0.0)


def test_executors_meet_those_of_the_other_role_only_and_gateways_those_that_decode() -> None:
    split = Split()
    split.ready("ex0", "ex1")
    assert [] == split.sent
    split.ready("ex2", "gw0")
    met = {(name, message.name) for name, message in split.sent if isinstance(message, PeerUp)}
    pairs = {("ex0", "ex2"), ("ex1", "ex2"), ("ex2", "gw0")}
    assert pairs | {(other, name) for name, other in pairs} == met


def test_no_two_executors_ever_share_an_epoch() -> None:
    split = Split()
    assert [1, 2, 3, 1, 1] == [split[name].epoch for name in split.KINDS]
    split.peers.bury("ex0", "gone", 1.0)
    assert 4 == split.peers.start("ex0", 1.0)
    split.peers.hear(Hello("ex0", 7, "nonce", 4, 1), 1.0)
    assert "restarting" == split["ex0"].state


def test_executors_that_differ_are_told_with_both_values() -> None:
    split = Split()
    split.offer("ex0", dtype="bfloat16")
    assert "" == split.peers.misfit("ex0"), "nobody to differ from yet"
    split.offer("ex1", dtype="float16")
    assert "" == split.peers.misfit("ex1"), "these two never meet"
    split.offer("ex2", dtype="bfloat16")
    expected = "ex2 and ex1 can't exchange KV: dtype is 'bfloat16' here and 'float16' there, where here is ex2"
    assert expected == split.peers.misfit("ex2")


def test_an_executor_without_a_connector_has_no_role() -> None:
    split = Split()
    split.offer("ex2", connector="")
    assert "ex2 is to decode, but its executor can't exchange KV" == split.peers.misfit("ex2")


def test_the_restart_budget_slides() -> None:
    budget = RestartBudget(allowed=2, window_s=60.0)

    assert [True, True, False, True, False] == [budget.spend(at_s) for at_s in (0.0, 10.0, 59.0, 61.0, 62.0)]
    assert 3 == budget.total

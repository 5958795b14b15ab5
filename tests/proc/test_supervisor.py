"""The supervisor with real processes that do no work: start, restarts, hangs, drain, and who is left afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.proc.server import ROOT, Server, is_alive

FAKES = "tests.fakes.server"
QUICK = ("--set", "supervisor.stop_grace_s=0.5")


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with Server(
        FAKES, *QUICK, "--set", "supervisor.restart_budget=100", "--set", "supervisor.stale_beat_s=2"
    ) as server:
        yield server.wait_up()


@pytest.fixture
def server(shared: Server) -> Server:
    """For tests that leave the server as well as it was."""
    shared.until_status("healthy")
    return shared


@pytest.fixture
def doomed() -> Iterator[Server]:
    """For tests that end it."""
    with Server(FAKES, *QUICK) as server:
        yield server.wait_up()


def known(server: Server, name: str) -> dict[str, float]:
    """Which peers `name` is connected to, and at which epoch, as its last beat tells."""
    return {key: value for key, value in server.actor(name).counters.items() if key.startswith("up.")}


def health_command(server: Server, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "epicycle", "health", "--run-dir", str(server.run_dir), *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)


def test_every_child_learns_of_the_peers_it_needs(server: Server) -> None:
    names = ("ex0", "control", "gw0")
    epochs = {f"up.{actor.name}": float(actor.epoch) for actor in server.health().actors if actor.name in names}
    expected = {name: {key: epoch for key, epoch in epochs.items() if key != f"up.{name}"} for name in names}

    server.until(lambda: {name: known(server, name) for name in expected} == expected, "introductions")
    reply = server.health(is_deep=True)

    assert ("healthy", "running", []) == (reply.status, reply.instance_state, reply.problems)
    assert all(actor.hop_ms >= 0 for actor in reply.actors)


@pytest.mark.parametrize("name", ["ex0", "control", "gw0"])
def test_a_killed_child_is_restarted_and_reintroduced(server: Server, name: str) -> None:
    old = server.actor(name)
    server.until(lambda: len(known(server, name)) == 2, "introductions")

    server.kill(name)
    server.until(lambda: server.actor(name).epoch == old.epoch + 1, "restart", 2.0)
    server.until_status("healthy")

    new = server.actor(name)
    assert (old.restarts + 1, "killed by SIGKILL") == (new.restarts, new.last_error)
    assert new.pid != old.pid
    others = {"ex0", "control", "gw0"} - {name}
    server.until(lambda: {known(server, other).get(f"up.{name}") for other in others} == {new.epoch}, "new epoch known")
    server.until(lambda: len(known(server, name)) == 2, "peers known to the new one")


def test_a_stopped_child_is_stale_until_it_continues(server: Server) -> None:
    epoch = server.actor("ex0").epoch
    server.kill("ex0", signal.SIGSTOP)
    server.until_status("degraded", 5.0)
    stale = server.actor("ex0")

    ended = health_command(server)

    assert ("stale", epoch) == (stale.state, stale.epoch)
    assert 1 == ended.returncode
    assert "! ex0" in ended.stdout
    assert "supervisor.stale_beat_s" in server.health().problems[0]

    server.kill("ex0", signal.SIGCONT)
    server.until_status("healthy", 2.0)

    assert epoch == server.actor("ex0").epoch


def test_a_wedged_loop_is_stale_although_its_process_beats() -> None:
    with Server(FAKES, *QUICK, "--set", "supervisor.stale_beat_s=1") as server:
        server.wait_up().kill("gw0", signal.SIGUSR1)
        server.until_status("degraded", 4.0)

        assert "loop has not turned" in server.health().problems[0]


def test_pending_work_that_does_not_move_is_a_hang() -> None:
    with Server(FAKES, *QUICK, "--set", "supervisor.watchdog_s=0.3") as server:
        server.wait_up().kill("control", signal.SIGUSR2)
        server.until_status("degraded", 4.0)

        assert "1 pending and no progress" in server.health().problems[0]


def test_a_hung_child_is_killed_where_the_configuration_says_so() -> None:
    flags = ("--set", "supervisor.stale_beat_s=1", "--set", "supervisor.kill_hung_after_s=1.5")
    with Server(FAKES, *QUICK, *flags) as server:
        server.wait_up().kill("ex0", signal.SIGSTOP)
        server.until(lambda: server.actor("ex0").epoch == 2, "restart of the hung executor", 5.0)
        server.until_status("healthy")

        assert "supervisor.kill_hung_after_s" in server.actor("ex0").last_error


def test_deep_health_names_the_actor_that_does_not_answer(server: Server) -> None:
    server.kill("ex0", signal.SIGSTOP)
    reply = server.health(is_deep=True)
    server.kill("ex0", signal.SIGCONT)

    assert "degraded" == reply.status
    assert "ex0 did not answer a ping" in reply.problems[0]


def test_no_orphans_when_the_supervisor_is_killed(doomed: Server) -> None:
    pids = doomed.pids()
    doomed.process.kill()

    doomed.until(lambda: not any(map(is_alive, pids)), "children gone", 2.0)
    assert 3 == len(pids)


def test_sigterm_to_the_whole_group_and_again_still_drains_and_leaves_nobody(doomed: Server) -> None:
    pids = doomed.pids()
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    doomed.process.terminate()
    doomed.process.terminate()

    assert 0 == doomed.wait_exit(4.0)
    assert not any(map(is_alive, pids))
    assert "sigterm_left_to_supervisor" in doomed.text()


def test_children_that_ignore_every_word_are_killed() -> None:
    with Server(FAKES, *QUICK, "--drain", "0", fake={"control": "stubborn", "ex0": "stubborn"}) as server:
        pids = server.wait_up().pids()
        server.process.terminate()

        assert 0 == server.wait_exit(8.0)
        assert not any(map(is_alive, pids))


def test_sigterm_while_a_child_still_loads_stops_at_once() -> None:
    with Server(FAKES, *QUICK, fake={"ex0": "silent"}) as server:
        server.until(lambda: (server.run_dir / "sup").exists() and len(server.pids()) == 3, "children")
        server.process.terminate()

        assert 0 == server.wait_exit(4.0)


def test_an_exception_in_a_callback_ends_the_child_and_shows_in_the_exit_code() -> None:
    with Server(FAKES, *QUICK, fake={"gw0": "clumsy"}) as server:
        server.wait_up().process.terminate()

        assert 1 == server.wait_exit(4.0)
        assert "KeyError: 'a bug in a callback'" in server.text()


def test_a_spent_restart_budget_stops_the_server_with_an_error() -> None:
    with Server(FAKES, *QUICK, "--set", "supervisor.restart_budget=1") as server:
        server.wait_up().kill("control")
        server.until(lambda: server.actor("control").epoch == 2, "restart")
        server.until_status("healthy")
        pids = server.pids()
        server.kill("control")

        assert 1 == server.wait_exit()
        assert "supervisor.restart_budget = 1" in server.text()
        assert not any(map(is_alive, pids))


def test_a_child_that_fails_to_start_stops_the_server_and_says_why() -> None:
    with Server(FAKES, *QUICK, fake={"ex0": "crash"}) as server:
        assert 1 == server.wait_exit()
        assert "ex0 failed to start: crashed: ValueError: engine.slots is 0, must be at least 1" in server.text()


def test_a_child_that_is_never_ready_stops_the_server() -> None:
    with Server(FAKES, *QUICK, "--set", "supervisor.startup_timeout_s=2", fake={"ex0": "silent"}) as server:
        assert 1 == server.wait_exit()
        assert "not Ready within supervisor.startup_timeout_s = 2" in server.text()


def test_a_taken_port_is_refused_before_anything_starts(server: Server) -> None:
    with Server(FAKES, *QUICK, port=server.port) as second:
        assert 1 == second.wait_exit()
        assert f"port {server.port} (--host, --port): Address already in use" in second.text()
        assert "starting" not in second.text()
    assert "healthy" == server.health().status


def test_a_run_directory_in_use_is_refused(server: Server) -> None:
    flags = ("--run-dir", str(server.run_dir))
    with Server(FAKES, *QUICK, *flags) as second:
        assert 1 == second.wait_exit()
        assert "in use by another server" in second.text()
    assert "healthy" == server.health().status


def test_a_single_process_answers_drains_and_leaves() -> None:
    with Server(FAKES, *QUICK, "--single-process") as server:
        reply = server.wait_up().health(is_deep=True)

        assert ("healthy", [server.process.pid]) == (reply.status, list({actor.pid for actor in reply.actors}))

        server.process.terminate()

        assert 0 == server.wait_exit(4.0)
        assert server.text().count('"drained"') == 2


def test_an_actor_that_crashes_ends_a_single_process_with_the_cause() -> None:
    with Server(FAKES, *QUICK, "--single-process", fake={"ex0": "crash"}) as server:
        assert 1 == server.wait_exit()
        assert "ex0 failed to start: ValueError: engine.slots is 0, must be at least 1" in server.text()


def test_an_exception_in_a_callback_ends_a_single_process() -> None:
    with Server(FAKES, *QUICK, "--drain", "0", "--single-process", fake={"gw0": "clumsy"}) as server:
        server.wait_up().process.terminate()

        assert 1 == server.wait_exit(4.0)
        assert "an actor's callback failed: KeyError: 'a bug in a callback'" in server.text()


def test_the_health_command_exits_0_when_all_is_well(server: Server) -> None:
    ended = health_command(server, "--json", "--deep")

    assert 0 == ended.returncode
    assert ["ex0", "control", "gw0", "supervisor"] == [actor["name"] for actor in json.loads(ended.stdout)["actors"]]


def test_the_health_command_exits_2_when_the_supervisor_hangs_or_is_gone(doomed: Server) -> None:
    doomed.process.send_signal(signal.SIGSTOP)
    hung = health_command(doomed, "--timeout", "0.5")
    doomed.process.kill()
    doomed.process.wait()
    gone = health_command(doomed)

    assert (2, 2) == (hung.returncode, gone.returncode)
    assert "didn't answer within 0.5 s" in hung.stderr
    assert "no server is running" in gone.stderr

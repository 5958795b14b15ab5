"""The gateway actor: HTTP site, ZeroMQ client endpoint and links, composed.

Owns what comes and goes (peers, drain, stop) and the order of start and end. Must not know what any part does with a
request.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web

from epicycle.actors.gateway.clients import ClientEndpoint
from epicycle.actors.gateway.core import Core
from epicycle.actors.gateway.served import load_files
from epicycle.actors.gateway.site import JsonRunner, make_application
from epicycle.actors.gateway.trace_file import unfit
from epicycle.actors.ports import BeatFacts, Host
from epicycle.actors.refusals import by_room
from epicycle.transport.attach import attach
from epicycle.transport.link import Receiver, path_name
from epicycle.transport.wire.columns import I32, unpack
from epicycle.transport.wire.control import Drain, Endpoint, MailboxStat, PeerDown, PeerUp
from epicycle.transport.wire.output import ToGateway
from epicycle.transport.wire.request import Admitting, Rejected, Verdict

TOKENIZER_THREADS = 2
SHUTDOWN_S = 2.0  # connections may flush this long after Stop
LAST_EXPORT_S = 0.4  # what a hanging disk or collector may hold up the end
DRAIN_GRACE_S = 1.0  # control aborts at the deadline; this long later the gateway does

_log = structlog.get_logger()


class Gateway:
    """Meets Actor."""

    def __init__(self, host: Host, http_socket: socket.socket) -> None:
        self._host = host
        self._http_socket = http_socket
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        number = int(host.name.removeprefix("gw"))
        self.core = Core(host, number, load_files(host.config), self._threads)
        self._runner = JsonRunner(
            make_application(self.core), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S
        )
        self._verdicts: Receiver[Any] = host.fabric.bind(host.name, host.epoch, "verdicts", Verdict)
        self._tokens: Receiver[Any] = host.fabric.bind(host.name, host.epoch, "tokens", ToGateway)
        self._executors: dict[str, PeerUp] = {}
        self._control: PeerUp | None = None
        self._admitting = Admitting(control_epoch=0)  # the last heard; a new control's may come before its PeerUp
        self._stopped = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._last_error = ""

    async def run(self) -> None:
        """Serve until on_stop."""
        loop, table = asyncio.get_running_loop(), self.core.table
        attachments = [
            attach(loop, self._verdicts, self._on_verdicts),
            attach(loop, self._tokens, table.on_output),
        ]
        clients = self._open_clients()
        try:
            await self._runner.setup()
            await web.SockSite(self._runner, self._http_socket).start()
            self._host.ready(self._endpoints(clients))
            await self._stopped.wait()
        finally:
            self.core.is_draining = True
            table.fail_all("draining", "the server has stopped")
            await self._runner.cleanup()
            if clients is not None:
                await clients.close()
            for attachment in attachments:
                attachment.close()
            if self.core.recorder is not None:
                await asyncio.to_thread(self.core.recorder.writer.close, LAST_EXPORT_S)
            if self.core.telemetry is not None:
                await asyncio.to_thread(self.core.telemetry.close, LAST_EXPORT_S)
            self._close()

    def on_peer_up(self, message: PeerUp) -> None:
        if message.capabilities is not None:
            if message.name in self._executors:
                self._lose_executor(message.name, "it was replaced")
            self._executors[message.name] = message
            self.core.table.executors[message.epoch] = message.name
            self._serve()
            self._log_served()
        elif message.name == "control":
            if self._control is not None:
                self._lose_control("it was replaced")
            self._control = message
            self.core.links.connect(message)
            self._serve()

    def on_peer_down(self, message: PeerDown) -> None:
        """An incarnation other than the one known is no news."""
        down = (message.name, message.epoch)
        self._last_error = f"{message.name} e{message.epoch} went down: {message.reason}"
        executor = self._executors.get(message.name)
        if executor is not None and executor.epoch == message.epoch:
            self._lose_executor(message.name, message.reason)
        elif self._control is not None and (self._control.name, self._control.epoch) == down:
            self._lose_control(message.reason)

    def on_drain(self, message: Drain) -> None:
        self.core.is_draining = True
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain(message.deadline_ms / 1e3))

    def on_stop(self) -> None:
        self._stopped.set()

    def beat_facts(self) -> BeatFacts:
        table = self.core.table
        return BeatFacts(
            # Requests in flight wait for control or the executor, which are watched themselves.
            progress=table.progress,
            pending=0,
            mailboxes=[MailboxStat("in_flight", len(table)), MailboxStat("cancel", self.core.links.waiting_cancels)],
            last_error=self._last_error,
            counters=self.core.counters(),
        )

    def _on_verdicts(self, messages: list[Verdict]) -> None:
        """Control's word that an executor is gone may be faster than that executor's last ones, which count."""
        if any(isinstance(message, Rejected) and message.code == "engine_lost" for message in messages):
            self._read_output()
        for message in messages:
            if isinstance(message, Admitting) and message.control_epoch >= self._admitting.control_epoch:
                self._admitting = message
                self._serve()
        self.core.table.on_verdicts([message for message in messages if not isinstance(message, Admitting)])

    def _read_output(self) -> None:
        while batch := self._tokens.drain():
            self.core.table.on_output(batch)

    def _lose_executor(self, name: str, reason: str) -> None:
        """What it still said counts; then its requests end. The others' go on."""
        self._read_output()
        executor = self._executors.pop(name)
        table, text = self.core.table, f"the executor is gone: {reason}"
        table.executors.pop(executor.epoch, None)
        self._serve()
        if self._executors:
            table.fail_executor(executor.epoch, "engine_lost", text)
        else:
            table.fail_all("engine_lost", text)

    def _serve(self) -> None:
        """Requests are checked against the executor that takes the longest. Which of them control knows it says itself:
        the supervisor tells both of a new one, and either may hear it first.
        """
        pools = [peer.capabilities for peer in self._executors.values() if peer.capabilities is not None]
        self.core.set_facts(by_room(pools)[0] if pools else None)
        known = unpack(I32, self._admitting.executor_epochs)
        is_heard = self._control is not None and self._control.epoch == self._admitting.control_epoch
        self.core.is_known_to_control = is_heard and any(peer.epoch in known for peer in self._executors.values())

    def _lose_control(self, reason: str) -> None:
        self._control = None
        self.core.links.disconnect()
        self._serve()
        self.core.table.fail_all("engine_lost", f"the control process is gone: {reason}")

    async def _drain(self, deadline_s: float) -> None:
        """Wait until nothing is in flight; at the deadline and a grace end what is left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s + DRAIN_GRACE_S):
                await self.core.table.wait_empty()
        self.core.table.fail_all("draining", "the server is shutting down; the drain deadline is over")
        if self.core.recorder is not None:
            await asyncio.to_thread(self.core.recorder.writer.flush, LAST_EXPORT_S)
        self._host.drained()

    def _open_clients(self) -> ClientEndpoint | None:
        """Without a run directory (single actors in tests) there is nowhere to bind."""
        run_dir, host = self._host.config.run_dir, self._host
        if not run_dir:
            return None
        return ClientEndpoint(self.core, Path(run_dir) / path_name(host.name, host.epoch, "client"))

    def _endpoints(self, clients: ClientEndpoint | None) -> list[Endpoint]:
        endpoints = [Endpoint(end.link, end.address) for end in (self._verdicts, self._tokens)]
        return endpoints if clients is None else [*endpoints, Endpoint("client", clients.address)]

    def _close(self) -> None:
        if self._draining is not None:
            self._draining.cancel()
        self.core.links.disconnect()
        self._verdicts.close()
        self._tokens.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _log_served(self) -> None:
        served = self.core.served
        assert served is not None
        _log.info(
            "serving",
            actor=self._host.name,
            epoch=self._host.epoch,
            model=served.files.model_id,
            context_tokens=served.facts.context_tokens,
            eos_ids=sorted(served.eos_ids),
            defaults=str(served.defaults),
        )
        strangers = unfit(served.files.traces, served.facts.loops)
        if strangers:
            _log.warning(
                "traces_unfit",
                actor=self._host.name,
                loops=served.facts.loops,
                traces=len(strangers),
                of=len(served.files.traces),
                first=strangers[0],
            )


def make_actor(host: Host, http_socket: socket.socket) -> Gateway:
    return Gateway(host, http_socket)

"""A gateway without HTTP: sends Submit and Cancel, and writes down everything it hears about each request."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from epicycle.transport.link import Sender
from epicycle.transport.wire.columns import F32, I32, U16, U64, pack, unpack, unpack_list
from epicycle.transport.wire.control import PeerUp
from epicycle.transport.wire.output import Fin, PrefixHit, PromptLogprobs, ToGateway, TokenBatch
from epicycle.transport.wire.request import (
    Accepted,
    Admitting,
    CacheReset,
    Cancel,
    LoopBounds,
    Rejected,
    ResetCache,
    Sampling,
    Submit,
    Verdict,
)
from tests.fakes.host import FakeHost


@dataclass
class Heard:
    """What a gateway has heard about one request."""

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    accepted: int = 0
    executor_epoch: int = 0  # whose it is, as far as a verdict or a token told
    cached_tokens: int = 0
    is_closed: bool = False  # ended here, since its executor was lost
    terminals: list[Fin | Rejected] = field(default_factory=list)

    @property
    def end(self) -> str:
        """The one terminal, as its reason or code; empty while there is none."""
        if not self.terminals:
            return ""
        assert len(self.terminals) == 1, self.terminals
        terminal = self.terminals[0]
        return terminal.reason if isinstance(terminal, Fin) else terminal.code


class FakeGateway:
    """Bound like a real one; `listen` reads its links, only when the test says so."""

    def __init__(self, host: FakeHost) -> None:
        self.number = int(host.name.removeprefix("gw"))
        self.heard: dict[int, Heard] = {}
        self.batches = 0
        self.late_terminals = 0
        self.resets: list[CacheReset] = []
        self.admitting: Admitting | None = None  # control's last word
        self.strangers = 0  # messages about requests that this incarnation never made; a real gateway drops them too
        self._host = host
        self._counter = 0
        bind = host.fabric.bind
        self.verdicts = bind(host.name, host.epoch, "verdicts", Verdict)
        self.tokens = bind(host.name, host.epoch, "tokens", ToGateway)
        self._submit: Sender | None = None
        self._cancel: Sender | None = None

    def meet_control(self, control: PeerUp) -> None:
        links = {end.link: end.address for end in control.endpoints}
        self._submit = self._host.fabric.connect(links["submit"])
        self._cancel = self._host.fabric.connect(links["cancel"])

    def submit(
        self,
        prompt: int | list[int] = 4,
        max_tokens: int = 4,
        *,
        priority: int = 0,
        deadline_ms: int = 0,
        loops: LoopBounds = LoopBounds(),  # noqa: B008 - frozen
        cache_salt: str = "",
        session_id: str = "",
        **sampling: object,
    ) -> int:
        """Send one request (`prompt`: ids, or how many) and return its rid."""
        ids = list(range(10, 10 + prompt)) if isinstance(prompt, int) else prompt
        self._counter += 1
        rid = self.number << 56 | (self._host.epoch & 0xFFFF) << 40 | self._counter
        self.heard[rid] = Heard()
        assert self._submit is not None
        self._submit.send(
            Submit(
                rid=rid,
                gateway=self.number,
                prompt=pack(I32, ids),
                sampling=Sampling(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
                loops=loops,
                priority=priority,
                deadline_ms=deadline_ms,
                cache_salt=cache_salt,
                session_id=session_id,
            )
        )
        return rid

    def reset_cache(self, ref: int) -> None:
        assert self._submit is not None
        self._submit.send(ResetCache(ref, self.number))

    def cancel(self, rid: int, cause: str = "client") -> None:
        assert self._cancel is not None
        self._cancel.send(Cancel(rid, cause))

    def lose_executor(self, epoch: int) -> None:
        """The executor is gone: read what it sent, then end what it had accepted."""
        self.listen()
        for rid, heard in self.heard.items():
            if not heard.terminals and heard.executor_epoch == epoch:
                self.cancel(rid)  # control may be about to run it again
                heard.is_closed = True
                heard.terminals.append(Rejected(rid, "engine_lost", "the executor is gone"))

    def listen(self) -> None:
        for verdict in self.verdicts.drain():
            self._take_verdict(verdict)
        for message in self.tokens.drain():
            self._take_output(message)

    def _take_verdict(self, verdict: object) -> None:
        match verdict:
            case Accepted(rid=rid, executor_epoch=epoch):
                heard = self.heard[rid]
                heard.accepted += 1
                heard.executor_epoch = heard.executor_epoch if heard.tokens else epoch
            case Rejected(rid=rid, code=code) if self.heard[rid].is_closed or (
                code == "engine_lost" and self.heard[rid].terminals
            ):
                self.late_terminals += 1  # control tells everybody, as it can't know what arrived
            case Rejected(rid=rid):
                self.heard[rid].terminals.append(verdict)
            case CacheReset():
                self.resets.append(verdict)
            case Admitting():
                self.admitting = verdict

    def _take_output(self, message: object) -> None:
        match message:
            case TokenBatch():
                self._take_tokens(message)
            case PromptLogprobs(rid=rid) | PrefixHit(rid=rid) | Fin(rid=rid) if rid not in self.heard:
                self.strangers += 1
            case Fin(rid=rid) if self.heard[rid].is_closed:
                self.late_terminals += 1
            case PromptLogprobs(rid=rid):
                assert not self.heard[rid].tokens, "prompt logprobs come before tokens"
                self.heard[rid].prompt_logprobs.append(message)
            case PrefixHit(rid=rid) if self.heard[rid].tokens and self.heard[rid].executor_epoch != message.epoch:
                self.strangers += 1  # of an executor that gave it up before its first token
            case PrefixHit(rid=rid, tokens=tokens):
                assert not self.heard[rid].tokens, "a hit is told before tokens"
                self.heard[rid].cached_tokens = tokens
            case Fin(rid=rid, tokens=tokens):
                assert tokens == len(self.heard[rid].tokens), "a Fin comes after the last token"
                self.heard[rid].terminals.append(message)

    def _take_tokens(self, batch: TokenBatch) -> None:
        self.batches += 1
        rids, firsts, counts = unpack(U64, batch.rids), unpack(I32, batch.first_index), unpack(I32, batch.counts)
        ks = unpack_list(I32, batch.logprob_k) or [-1] * len(rids)
        tokens, depths = iter(unpack(I32, batch.tokens)), iter(unpack(U16, batch.exit_depths))
        logprobs, top_ids = iter(unpack(F32, batch.logprobs)), iter(unpack(I32, batch.top_ids))
        for rid, first, count, k in zip(rids, firsts, counts, ks, strict=True):
            if rid not in self.heard:
                self.strangers += 1
            heard = self.heard.get(rid, Heard())
            assert rid not in self.heard or first == len(heard.tokens), "no gap and no repetition"
            heard.executor_epoch = batch.epoch
            heard.tokens += islice(tokens, count)
            heard.depths += islice(depths, count)
            if k >= 0:
                heard.logprobs += islice(logprobs, count)
                heard.top_ids += islice(top_ids, count * k)
        assert (None, None, None) == (next(tokens, None), next(logprobs, None), next(top_ids, None)), (
            "rows fill columns"
        )

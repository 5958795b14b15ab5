"""The one configuration tree: frozen, every field with a default and a doc line, read from TOML and flags.

It lives in transport because it crosses process boundaries (the supervisor writes it into the run directory, children
read it there) and every layer may see it. Fields describe; `violations()` holds the cross-field rules in one table and
reports all of them at once.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from epicycle.transport.errors import TransportError
from epicycle.transport.executor_rules import EXECUTOR_RULES

RECORD_SALT_BYTES = 64  # BLAKE2b's longest key


class ConfigError(TransportError):
    """The configuration can't be used; the text lists every violation with value, limit and knob."""

    code = "bad_config"


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the sections: unknown keys are errors."""


def doc(text: str) -> Meta:
    return Meta(description=text)


class ServerConfig(Section, frozen=True):
    host: Annotated[str, doc("address the HTTP server binds")] = "127.0.0.1"
    port: Annotated[int, doc("HTTP port; 0 picks a free one")] = 8000
    gateways: Annotated[int, doc("gateway processes that share the HTTP socket")] = 1
    served_model_name: Annotated[str, doc("model id clients see; empty: the folder name")] = ""
    api_key: Annotated[str, doc("bearer key clients must send; empty: none")] = ""
    allowed_origins: Annotated[list[str], doc("browser origins that may call (CORS); empty: CORS off")] = []
    max_body_bytes: Annotated[int, doc("largest request body")] = 4 << 20
    body_timeout_s: Annotated[float, doc("a body must arrive within this")] = 30.0
    header_wait_s: Annotated[float, doc("headers of a stream wait this long for the first token")] = 5.0
    keepalive_s: Annotated[float, doc("interval of SSE comments while nothing is written; 0: off")] = 10.0
    request_deadline_s: Annotated[float, doc("longest life of a request, queue included; 0: none")] = 0.0
    max_choices: Annotated[int, doc("largest n, and prompts x n of one request")] = 64
    slow_client_events: Annotated[int, doc("events one client may leave unread before it is cut off")] = 4096
    trace_file: Annotated[
        str, doc("recorded exit depths by trace id, for exit rule trace: a JSON object of lists, or a --record file")
    ] = ""


class EngineConfig(Section, frozen=True):
    model: Annotated[str, doc("embedded:ouro, embedded:huginn, a shipped config name, or a folder")] = "embedded:ouro"
    weights: Annotated[str, doc("auto: the checkpoint's; random: drawn from the config")] = "auto"
    dtype: Annotated[str, doc("auto: float32 on CPU, bfloat16 on GPU; or float32, bfloat16, float16")] = "auto"
    device: Annotated[str, doc("auto, cpu, or cuda:N")] = "auto"
    slots: Annotated[int, doc("requests resident at once")] = 32
    context_tokens: Annotated[
        int, doc("longest prompt + output; 0: the largest the pool funds, at most the model's")
    ] = 0
    page_tokens: Annotated[int, doc("positions per KV page")] = 16
    kv_layout: Annotated[str, doc("last_exited, shared, or budgeted:K")] = "last_exited"
    pack_recurrent_planes: Annotated[bool, doc("slot-exact pages; false: the rectangular twin")] = True
    kv_memory_bytes: Annotated[int, doc("bytes of the KV pool; 0: automatic")] = 0
    host_kv_bytes: Annotated[
        int, doc("host memory for KV of preempted requests; 0: as the pool, at most 4 GiB or a quarter of the machine")
    ] = 0
    host_prefix_bytes: Annotated[int, doc("host memory for cached prefixes that the pool gives up; 0: none")] = 0
    exit_rule: Annotated[str, doc("early-exit rule; empty: the model's default")] = ""
    loops: Annotated[int, doc("serve with this depth instead of the model's; 0: the model's")] = 0
    prompt_chunk_tokens: Annotated[int, doc("prompt rows per tick, shared by the prompts in flight; 0: automatic")] = 0
    numerics: Annotated[str, doc("invariant: bits never depend on the batch; fast: library defaults")] = "invariant"
    cpu_threads: Annotated[int, doc("torch threads on a CPU; fixed, since bits may depend on it")] = 1
    run_ahead_ticks: Annotated[int, doc("ticks launched before the oldest is harvested")] = 2
    tick: Annotated[str, doc("device: the device decides, read late; eager: the host does; auto: by device")] = "auto"
    attention: Annotated[
        str, doc("attention kernels of a GPU: auto, triton, flash_attn (the best for the card), fa2, fa3, or fa4")
    ] = "auto"
    graphs: Annotated[str, doc("on: replay a GPU's ticks from captured graphs; off: launch them step by step")] = "on"
    start_state: Annotated[str, doc("Huginn's initial state: noise (position-keyed) or zero")] = "noise"
    noise_seed: Annotated[int, doc("key of Huginn's start-state noise; part of the prefix key")] = 0
    lookahead_seed: Annotated[int, doc("seed of the random_lookahead score")] = 0
    random_seed: Annotated[int, doc("seed of --weights random")] = 0
    poison: Annotated[bool, doc("fill freed pages with NaN, to prove that nothing stale is read")] = False


class SchedulerConfig(Section, frozen=True):
    max_waiting: Annotated[int, doc("requests queued before admission answers 429")] = 1024
    scan_limit: Annotated[int, doc("waiting requests looked at per admission pass")] = 64
    max_bypasses: Annotated[int, doc("later requests that may pass a blocked one before admission waits for it")] = 8
    ageing_s: Annotated[float, doc("every this many seconds of waiting improve priority by one; 0: never")] = 10.0
    queue_limit_s: Annotated[float, doc("longest wait for a slot; 0: none")] = 0.0
    generation_limit_s: Annotated[float, doc("longest time from slot to end; 0: none")] = 0.0
    reservation: Annotated[str, doc("lifetime: pages for the whole request at admission; incremental: as it grows")] = (
        "incremental"
    )
    preemption: Annotated[
        bool, doc("save the request of the lowest priority on the host where the pool is dry; false: it ends early")
    ] = True
    low_water_tokens: Annotated[int, doc("a lease is grown when fewer positions than this are left")] = 32
    grow_tokens: Annotated[int, doc("positions added per growth")] = 64
    prefix_cache: Annotated[bool, doc("share the pages of equal prompt beginnings, also after their request")] = True
    prefix_reserve_bytes: Annotated[int, doc("cached prefixes that live requests may not evict below this")] = 0
    session_pin_s: Annotated[float, doc("a session's last prompt stays cached so long after its end; 0: no pins")] = (
        300.0
    )
    session_pin_pages: Annotated[int, doc("pages that all sessions together may pin; 0: a quarter of the pool")] = 0


class SupervisorConfig(Section, frozen=True):
    watchdog_s: Annotated[float, doc("pending work without progress for this long is a hang")] = 3.0
    stale_beat_s: Annotated[float, doc("no heartbeat for this long is a hang")] = 3.0
    kill_hung_after_s: Annotated[
        float, doc("a child that has hung for this long is killed and restarted; 0: never")
    ] = 0.0
    startup_timeout_s: Annotated[float, doc("a child must be Ready within this")] = 600.0
    restart_budget: Annotated[int, doc("restarts of one child within restart_window_s before the server stops")] = 3
    restart_window_s: Annotated[float, doc("window of the restart budget")] = 60.0
    drain_s: Annotated[float, doc("running requests may finish for this long after SIGTERM")] = 30.0
    stop_grace_s: Annotated[float, doc("between SIGTERM and SIGKILL of a child")] = 4.0


class ExecutorConfig(Section, frozen=True):
    kind: Annotated[str, doc("engine, or mock: no torch, one token per stream and tick")] = "engine"
    mock_tick_ms: Annotated[float, doc("tick time of the mock executor")] = 0.0
    mock_pages: Annotated[int, doc("pages in the mock executor's pool")] = 4096
    mock_host_prefix_pages: Annotated[int, doc("pages of cached prefixes the mock executor can keep on the host")] = 0
    mock_host_pages: Annotated[int, doc("pages the mock executor can save preempted requests in")] = 4096
    replicas: Annotated[list[str], doc("one full executor on each of these devices; empty: one on engine.device")] = []
    prefill: Annotated[list[str], doc("executors on these devices compute prompts for those of executor.decode")] = []
    decode: Annotated[list[str], doc("executors on these devices take prompts' KV over and make the tokens")] = []
    prefill_slots: Annotated[
        int, doc("prompts under way at once on each executor of prefill; each also holds a slot where it will decode")
    ] = 16
    kv_memory_shares: Annotated[
        list[int],
        doc("KV pool bytes of each executor, prefill's first, then decode's; empty: engine.kv_memory_bytes for each"),
    ] = []


class TransferConfig(Section, frozen=True):
    """How executors hand each other the KV of prompts."""

    connector: Annotated[
        str, doc("off; nixl; copy: executors of one process only; auto: what the executors need, if anything")
    ] = "auto"
    nixl_backend: Annotated[str, doc("NIXL backend that carries the bytes")] = "UCX"
    chunk_bytes: Annotated[int, doc("largest write")] = 256 << 20
    inflight_bytes: Annotated[int, doc("bytes of writes that may be on their way at once")] = 2 << 30
    idle_s: Annotated[float, doc("a transfer with writes on their way that moves nothing for so long has failed")] = (
        30.0
    )
    least_tokens: Annotated[
        int, doc("a prompt with fewer tokens left to compute than this is computed where it decodes")
    ] = 16


class RecordConfig(Section, frozen=True):
    """Capture of what is served, as a trace for `epicycle replay`."""

    file: Annotated[str, doc("write served requests and their exit depths to this file, as a trace; empty: off")] = ""
    text: Annotated[bool, doc("record prompts themselves; otherwise keyed hashes of their blocks")] = False
    salt: Annotated[str, doc("key of the hashes, up to 64 bytes; empty: a fresh one per server")] = ""
    block_tokens: Annotated[int, doc("tokens per hashed block; 0: engine.page_tokens")] = 0
    part_bytes: Annotated[int, doc("the file is moved aside as FILE.N at this size; 0: never")] = 1 << 30
    keep_parts: Annotated[int, doc("complete parts kept per gateway, the oldest are deleted; 0: all")] = 0


class OtelConfig(Section, frozen=True):
    """OpenTelemetry traces of requests, sent by OTLP over HTTP. Needs the extra `otel`."""

    endpoint: Annotated[str, doc("collector, such as http://localhost:4318; empty: no traces")] = ""
    headers: Annotated[list[str], doc("NAME=VALUE headers for the collector")] = []
    sample_ratio: Annotated[float, doc("share of requests that are traced; a client's traceparent wins over it")] = 1.0
    service_name: Annotated[str, doc("service.name of the spans")] = "epicycle"


class LogConfig(Section, frozen=True):
    format: Annotated[str, doc("auto (console on a terminal, else json), json, or console")] = "auto"
    level: Annotated[str, doc("debug, info, warning, or error")] = "info"


class Config(Section, frozen=True):
    server: ServerConfig = ServerConfig()
    engine: EngineConfig = EngineConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    executor: ExecutorConfig = ExecutorConfig()
    transfer: TransferConfig = TransferConfig()
    record: RecordConfig = RecordConfig()
    otel: OtelConfig = OtelConfig()
    log: LogConfig = LogConfig()
    run_dir: Annotated[str, doc("run directory; empty: a fresh one under XDG_RUNTIME_DIR or /tmp")] = ""
    single_process: Annotated[bool, doc("all actors in one process, for debugging")] = False


Rule = tuple[str, Callable[[Config], bool], Callable[[Config], str]]


def _one_of(path: str, allowed: tuple[str, ...]) -> Rule:
    return (
        path,
        lambda config: value_at(config, path) in allowed,
        lambda config: f"is {value_at(config, path)!r}, must be one of {', '.join(allowed)}",
    )


def _between(path: str, low: float, high: float) -> Rule:
    return (
        path,
        lambda config: low <= value_at(config, path) <= high,
        lambda config: f"is {value_at(config, path)}, must be between {low} and {high}",
    )


def _between_each(path: str, low: float, high: float) -> Rule:
    return (
        path,
        lambda config: all(low <= value <= high for value in value_at(config, path)),
        lambda config: f"is {value_at(config, path)}, each must be between {low} and {high}",
    )


def value_at(config: Config, path: str) -> Any:
    """The value of a dotted path such as `engine.slots`."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


RULES: tuple[Rule, ...] = (
    _between("server.port", 0, 65535),
    _between("server.gateways", 1, 64),
    _between("server.max_body_bytes", 1024, 1 << 30),
    _between("server.body_timeout_s", 0.001, 86_400),
    _between("server.header_wait_s", 0, 86_400),
    _between("server.keepalive_s", 0, 86_400),
    _between("server.request_deadline_s", 0, 30 * 86_400),
    _between("server.max_choices", 1, 4096),
    _between("server.slow_client_events", 16, 1 << 20),
    _one_of("engine.weights", ("auto", "random")),
    _one_of("engine.dtype", ("auto", "float32", "bfloat16", "float16")),
    _one_of("engine.numerics", ("invariant", "fast")),
    _one_of("engine.start_state", ("noise", "zero")),
    _one_of("engine.tick", ("auto", "eager", "device")),
    _one_of("engine.attention", ("auto", "triton", "flash_attn", "fa2", "fa3", "fa4")),
    _one_of("engine.graphs", ("on", "off")),
    _between("engine.slots", 1, 4096),
    _between("engine.context_tokens", 0, 1 << 24),
    _between("engine.page_tokens", 1, 1024),
    _between("engine.kv_memory_bytes", 0, 1 << 50),
    _between("engine.host_kv_bytes", 0, 1 << 50),
    _between("engine.host_prefix_bytes", 0, 1 << 50),
    _between("engine.loops", 0, 1024),
    _between("engine.prompt_chunk_tokens", 0, 1 << 16),
    _between("engine.cpu_threads", 1, 1024),
    _between("engine.run_ahead_ticks", 1, 16),
    _between("engine.noise_seed", 0, (1 << 63) - 1),
    _between("engine.lookahead_seed", 0, (1 << 63) - 1),
    _between("engine.random_seed", 0, (1 << 63) - 1),
    _between("scheduler.max_waiting", 1, 1 << 20),
    _between("scheduler.scan_limit", 1, 1 << 16),
    _between("scheduler.max_bypasses", 0, 1 << 16),
    _between("scheduler.ageing_s", 0, 86_400),
    _between("scheduler.queue_limit_s", 0, 30 * 86_400),
    _between("scheduler.generation_limit_s", 0, 30 * 86_400),
    _one_of("scheduler.reservation", ("lifetime", "incremental")),
    _between("scheduler.low_water_tokens", 1, 1 << 16),
    _between("scheduler.grow_tokens", 1, 1 << 16),
    _between("scheduler.prefix_reserve_bytes", 0, 1 << 50),
    _between("scheduler.session_pin_s", 0, 86_400),
    _between("scheduler.session_pin_pages", 0, 1 << 24),
    _between("supervisor.watchdog_s", 0.1, 86_400),
    _between("supervisor.stale_beat_s", 1, 86_400),
    _between("supervisor.kill_hung_after_s", 0, 86_400),
    _between("supervisor.startup_timeout_s", 1, 86_400),
    _between("supervisor.restart_budget", 0, 1000),
    _between("supervisor.restart_window_s", 1, 86_400),
    _between("supervisor.drain_s", 0, 86_400),
    _between("supervisor.stop_grace_s", 0, 600),
    _one_of("executor.kind", ("engine", "mock")),
    _between("executor.mock_tick_ms", 0, 60_000),
    _between("executor.mock_pages", 1, 1 << 24),
    _between("executor.mock_host_pages", 0, 1 << 24),
    _between("executor.mock_host_prefix_pages", 0, 1 << 24),
    _one_of("transfer.connector", ("auto", "off", "nixl", "copy")),
    _between("transfer.chunk_bytes", 1, 1 << 40),
    _between("transfer.inflight_bytes", 1, 1 << 40),
    (
        "transfer.chunk_bytes",
        lambda config: config.transfer.chunk_bytes <= config.transfer.inflight_bytes,
        lambda config: (
            f"is {config.transfer.chunk_bytes}, must not be above transfer.inflight_bytes "
            f"({config.transfer.inflight_bytes})"
        ),
    ),
    _between("transfer.idle_s", 0.1, 86_400),
    _between("transfer.least_tokens", 0, 1 << 24),
    _between("executor.prefill_slots", 1, 4096),
    _between_each("executor.kv_memory_shares", 0, 1 << 50),
    *EXECUTOR_RULES,
    (
        "record.salt",
        lambda config: len(config.record.salt.encode()) <= RECORD_SALT_BYTES,
        lambda config: f"has {len(config.record.salt.encode())} bytes, must have at most {RECORD_SALT_BYTES}",
    ),
    _between("record.block_tokens", 0, 1 << 16),
    _between("record.part_bytes", 0, 1 << 50),
    _between("record.keep_parts", 0, 1 << 20),
    (
        "otel.endpoint",
        lambda config: not config.otel.endpoint or config.otel.endpoint.startswith(("http://", "https://")),
        lambda config: f"is {config.otel.endpoint!r}, must begin with http:// or https://",
    ),
    (
        "otel.headers",
        lambda config: all("=" in header for header in config.otel.headers),
        lambda config: f"is {config.otel.headers}, must be NAME=VALUE each",
    ),
    _between("otel.sample_ratio", 0, 1),
    _one_of("log.format", ("auto", "json", "console")),
    _one_of("log.level", ("debug", "info", "warning", "error")),
)


def violations(config: Config) -> list[str]:
    """Every broken rule as one line `path value-and-limit`; empty when the tree is usable."""
    return [f"{path} {explain(config)}" for path, is_met, explain in RULES if not is_met(config)]


def load(toml: Path | None, overrides: dict[str, Any]) -> Config:
    """Defaults, then the TOML file, then `overrides` (dotted path -> value). Raises ConfigError naming every fault."""
    tree: dict[str, Any] = {}
    if toml is not None:
        try:
            tree = tomllib.loads(toml.read_text())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"config file {toml}: {error}") from error
    for path, value in overrides.items():
        *parents, leaf = path.split(".")
        branch = tree
        for name in parents:
            branch = branch.setdefault(name, {})
            if not isinstance(branch, dict):
                raise ConfigError(f"config file {toml}: {name} is {branch!r}, must be a table")
        branch[leaf] = value
    try:
        config = msgspec.convert(tree, Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config: {error}") from error
    broken = violations(config)
    if broken:
        raise ConfigError("config: " + "; ".join(broken))
    return config

"""GET /v1/models, /v1/models/{id} and /version: what is served, with its limits and defaults. No probe."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import msgspec
from aiohttp import web

from epicycle import __version__
from epicycle.actors.build_facts import commit_at_start, host
from epicycle.actors.gateway.core import Core
from epicycle.actors.gateway.errors import ApiError
from epicycle.transport.executors import executor_specs


def add_routes(router: web.UrlDispatcher, core: Core) -> None:
    async def models(_request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [describe(core)]})

    async def model(request: web.Request) -> web.Response:
        wanted = request.match_info["id"]
        if wanted != core.files.model_id:
            text = f"model {wanted[:100]!r} is not served here; the served model is {core.files.model_id!r}"
            raise ApiError("model_not_found", text, "model")
        return _json(describe(core))

    async def version(_request: web.Request) -> web.Response:
        config = hashlib.sha256(msgspec.json.encode(core.config)).hexdigest()[:16]
        build = {"version": __version__, "commit": await asyncio.to_thread(commit_at_start), "config": config}
        return _json({**build, "host": host(), "executors": _executors(core), **_engine_facts(core)})

    router.add_get("/v1/models", models)
    router.add_get("/v1/models/{id:.+}", model)
    router.add_get("/version", version)


def describe(core: Core) -> dict[str, Any]:
    """The model card. Limits are those in effect, known once an executor is up."""
    card: dict[str, Any] = {
        "id": core.files.model_id,
        "object": "model",
        "created": 0,
        "owned_by": "epicycle",
    }
    if core.served is not None:
        facts = core.served.facts
        card |= {
            "max_model_len": facts.context_tokens,
            "context_length": facts.context_tokens,
            "model_context_length": facts.model_context_tokens,
            "vocab_size": facts.vocab_size,
            "model_type": facts.model_type,
            "loops": facts.loops,
            "exit_rule": facts.exit_rule,
            "can_exit_early": facts.can_exit_early,
            "kv_layout": facts.kv_layout,
            "dtype": facts.dtype,
            "device": facts.device,
            "has_chat_template": core.files.template is not None,
            "eos_token_ids": sorted(core.served.eos_ids),
            "defaults": msgspec.to_builtins(core.served.defaults),
        }
    return card


def _executors(core: Core) -> list[dict[str, str]]:
    return [{"name": spec.name, "role": spec.role, "device": spec.device} for spec in executor_specs(core.config)]


def _engine_facts(core: Core) -> dict[str, Any]:
    """How the executor computes; known once it is up."""
    if core.served is None:
        return {"libraries": []}
    facts = core.served.facts
    graphs = {"captured": facts.graphs, "bytes": facts.graph_bytes, "capture_ms": facts.graph_ms}
    plan = {**facts.plan_terms, "host_pages": facts.host_pages, "line": facts.plan_line}
    return {"libraries": facts.versions, "attention": facts.attention, "graphs": graphs, "kv_plan": plan}


def _json(content: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json")

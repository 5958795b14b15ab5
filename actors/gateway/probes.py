"""Probes and metrics: /livez, /readyz, /health, /metrics. None of them generates, none waits without a deadline.

Liveness says that this loop turns; readiness that a request would be admitted now; health is the supervisor's verdict
about the whole instance.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from epicycle.actors.gateway.core import Core
from epicycle.actors.gateway.errors import ApiError
from epicycle.actors.gateway.metrics import CONTENT_TYPE, exposition
from epicycle.transport.wire.control import HealthReply

METRICS_MAX_AGE_S = 0.5


def add_routes(router: web.UrlDispatcher, core: Core) -> None:
    async def livez(_request: web.Request) -> web.Response:
        return _json(200, {"status": "alive", "gateway": core.name})

    async def readyz(_request: web.Request) -> web.Response:
        try:
            core.admit()
        except ApiError as error:
            return _json(503, {"status": error.code, "reason": error.message})
        return _json(200, {"status": "ready"})

    async def health(_request: web.Request) -> web.Response:
        try:
            reply = await core.health.ask()
        except TimeoutError:
            return _json(503, {"status": "unknown", "problems": ["the supervisor does not answer"]})
        return _json(200 if reply.status == "healthy" else 503, health_body(reply))

    async def metrics(_request: web.Request) -> web.Response:
        try:
            reply = await core.health.ask(METRICS_MAX_AGE_S)
        except TimeoutError:
            reply = None  # the gateway's own numbers still stand
        body = exposition(core.files.model_id, core.name, core.counters(), reply)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    router.add_get("/livez", livez)
    router.add_get("/readyz", readyz)
    router.add_get("/health", health)
    router.add_get("/metrics", metrics)


def health_body(reply: HealthReply) -> dict[str, object]:
    actors = [
        {
            "name": actor.name,
            "state": actor.state,
            "epoch": actor.epoch,
            "restarts": actor.restarts,
            "beat_age_ms": round(actor.beat_age_ms, 1),
            "progress_age_ms": round(actor.progress_age_ms, 1),
            "in_flight": actor.in_flight,
            "last_error": actor.last_error,
        }
        for actor in reply.actors
    ]
    return {
        "status": reply.status,
        "instance_state": reply.instance_state,
        "problems": reply.problems,
        "actors": actors,
    }


def _json(status: int, content: object) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(content), content_type="application/json")

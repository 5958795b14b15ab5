"""POST /tokenize and /detokenize, GET /tokenizer_info, with and without the /v1 prefix: for evaluation clients."""

from __future__ import annotations

import msgspec
from aiohttp import web

from epicycle.actors.gateway import ranges
from epicycle.actors.gateway.bodies import Decoder, DetokenizeBody, TokenizeBody
from epicycle.actors.gateway.core import Core
from epicycle.actors.gateway.errors import ApiError
from epicycle.actors.gateway.prompts import check_model, need_tokenizer
from epicycle.actors.gateway.reading import read_json_body
from epicycle.actors.gateway.served import Served


def add_routes(router: web.UrlDispatcher, core: Core) -> None:
    decode_tokenize, decode_detokenize = Decoder(TokenizeBody), Decoder(DetokenizeBody)

    async def tokenize(request: web.Request) -> web.Response:
        served = _served(core)
        body: TokenizeBody = decode_tokenize(await read_json_body(request, core.config.server))
        check_model(body.model, served)
        tokenizer = need_tokenizer(served, "prompt")
        ids = await core.validator.prompts.off_loop(
            len(body.prompt), lambda: tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
        )
        return _json({"tokens": ids, "count": len(ids)})

    async def detokenize(request: web.Request) -> web.Response:
        served = _served(core)
        body: DetokenizeBody = decode_detokenize(await read_json_body(request, core.config.server))
        check_model(body.model, served)
        tokenizer = need_tokenizer(served, "tokens")
        ids = ranges.token_ids("tokens", body.tokens, served.facts.vocab_size)
        text = await core.validator.prompts.off_loop(len(ids), lambda: tokenizer.decode(ids, skip_special_tokens=False))
        return _json({"prompt": text})

    async def tokenizer_info(_request: web.Request) -> web.Response:
        served = _served(core)
        tokenizer = need_tokenizer(served, "tokenizer")
        template = served.files.template
        info = {
            **tokenizer.config,
            "chat_template": None if template is None else template.source,
            "vocab_size": served.facts.vocab_size,
            "eos_token_ids": sorted(served.eos_ids),
        }
        return _json(info)

    for prefix in ("", "/v1"):
        router.add_post(f"{prefix}/tokenize", tokenize)
        router.add_post(f"{prefix}/detokenize", detokenize)
        router.add_get(f"{prefix}/tokenizer_info", tokenizer_info)


def _served(core: Core) -> Served:
    if core.served is None:
        raise ApiError("not_ready", "no executor is ready: it is loading or restarting")
    return core.served


def _json(content: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json")

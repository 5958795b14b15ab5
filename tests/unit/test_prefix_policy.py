"""What a request may find in the prefix cache, and what its keys stand for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from epicycle.actors.mock_model import mock_capabilities
from epicycle.actors.prefix_policy import PrefixPolicy, prefix_policy
from epicycle.transport.wire.columns import I32, pack
from epicycle.transport.wire.control import Capabilities
from epicycle.transport.wire.request import LoopBounds, Sampling, Submit
from tests.sim.world import make_config

CONFIG = make_config(prefix_cache=True)
FACTS = mock_capabilities(CONFIG)


def policy(facts: Capabilities = FACTS, **scheduler: Any) -> PrefixPolicy:
    return prefix_policy(make_config(**({"prefix_cache": True} | scheduler)), facts)


def submit(tokens: int = 40, prompt_logprobs: int = -1, **fields: Any) -> Submit:
    sampling = Sampling(max_tokens=4, prompt_logprobs=prompt_logprobs)
    return Submit(1, 0, pack(I32, range(tokens)), sampling, LoopBounds(), **fields)


@pytest.mark.parametrize(("tokens", "planes", "hits"), [(40, 4, 2), (32, 4, 2), (32, 1, 1), (33, 1, 2), (16, 2, 0)])
def test_where_loops_share_planes_a_hit_leaves_the_last_token_its_own_page(tokens: int, planes: int, hits: int) -> None:
    assert hits == policy(msgspec.structs.replace(FACTS, planes=planes)).most_hits(submit(tokens))


def test_prompt_logprobs_find_nothing_but_have_keys() -> None:
    asked = submit(prompt_logprobs=0)
    assert (0, 2) == (policy().most_hits(asked), len(policy().keys(asked)))


def test_without_the_cache_there_are_no_keys() -> None:
    off = policy(prefix_cache=False)
    assert ((), 0, None) == (off.keys(submit()), off.most_hits(submit()), off.session(submit(session_id="s")))


@pytest.mark.parametrize("fact", ["fingerprint", "kv_layout", "dtype", "device", "model_type"])
def test_keys_stand_for_the_model_and_its_layout(fact: str) -> None:
    other = policy(msgspec.structs.replace(FACTS, **{fact: "other"}))
    assert not set(policy().keys(submit())) & set(other.keys(submit()))


def test_keys_stand_for_noise_and_salt() -> None:
    variants = [submit(), submit(noise_seed=1), submit(cache_salt="a"), submit(cache_salt="b")]
    assert 4 * 2 == len({key for one in variants for key in policy().keys(one)})
    assert policy().keys(submit()) == policy().keys(submit(session_id="s"))


def test_sessions_are_salted_and_can_be_switched_off() -> None:
    assert ("a", "s") == policy().session(submit(session_id="s", cache_salt="a"))
    assert (None, None) == (policy().session(submit()), policy(session_pin_s=0.0).session(submit(session_id="s")))


def test_limits_are_in_pages() -> None:
    limits = policy(prefix_reserve_bytes=3 * FACTS.page_bytes + 1)
    assert (3, FACTS.total_pages // 4) == (limits.reserve_pages, limits.pin_pages)
    assert 7 == policy(session_pin_pages=7).pin_pages

"""The server under test: a stack in this loop, or a running one at EPICYCLE_E2E_URL (embedded:ouro, executor mock)."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest

from tests.e2e.client import Client
from tests.fakes.stack import Stack


@pytest.fixture
async def base_url() -> AsyncIterator[str]:
    running = os.environ.get("EPICYCLE_E2E_URL")
    if running:
        yield running
        return
    async with Stack() as stack:
        yield stack.base_url


@pytest.fixture
async def client(base_url: str) -> AsyncIterator[Client]:
    async with Client(base_url) as client:
        yield client


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with Stack() as stack:
        yield stack

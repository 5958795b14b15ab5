"""epicycle: a server for looped language models that schedules, batches and caches per loop.

The package itself holds the version and the embeddable client only; everything else is imported by name
(``epicycle.transport``, ``epicycle.actors``, ...). Importing it loads neither torch nor aiohttp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__"]

if TYPE_CHECKING:
    from epicycle.transport.client import AsyncClient, Client


def __getattr__(name: str) -> object:
    """Load the client on first use, so that ``import epicycle`` stays free of zmq."""
    if name in ("AsyncClient", "Client"):
        from epicycle.transport import client

        return getattr(client, name)
    raise AttributeError(f"module 'epicycle' has no attribute {name!r}")

"""`python -m epicycle.actors.gateway`: the gateway's process, started by the supervisor."""

from __future__ import annotations

from epicycle.actors import child
from epicycle.actors.gateway.app import make_actor

if __name__ == "__main__":
    child.run(make_actor)

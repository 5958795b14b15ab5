"""A server whose children are fakes: `python -m tests.fakes.server [flags of epicycle serve]`."""

from __future__ import annotations

import sys

from epicycle.actors import logs
from epicycle.actors.instance import serve
from epicycle.tools.serve_flags import read

KINDS = ("executor", "control", "gateway")

if __name__ == "__main__":
    config = read(sys.argv[1:])
    logs.configure(config.log)
    outcome = serve(
        config,
        lambda instance: print(f"up at port {instance.port}", flush=True),
        dict.fromkeys(KINDS, "tests.fakes.child"),
    )
    print(outcome.cause, file=sys.stderr)
    sys.exit(outcome.exit_code)

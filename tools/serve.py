"""`epicycle serve`: flags and a file become a configuration, names are checked, and the server runs until stopped.

Prints one line when the server can answer. Exit code: 0 after an orderly stop, 1 when the server gave up by itself or
could not start, 2 for a bad command line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from epicycle.actors import logs
from epicycle.actors.errors import ActorError
from epicycle.actors.instance import serve
from epicycle.engine.errors import LoadError
from epicycle.engine.models.locate import locate
from epicycle.tools.serve_flags import read
from epicycle.transport.config import Config, ConfigError
from epicycle.transport.errors import TransportError
from epicycle.transport.executors import executor_specs
from epicycle.transport.rundir import Instance


def main(argv: Sequence[str]) -> int:
    try:
        config = read(argv)
        _check_model(config)
    except (ConfigError, LoadError) as error:
        return _complain(str(error), 2)
    logs.configure(config.log)
    try:
        outcome = serve(config, lambda instance: _announce(config, instance))
    except (ActorError, TransportError) as error:
        return _complain(str(error), 1)
    return _complain(outcome.cause, outcome.exit_code) if outcome.cause else outcome.exit_code


def _check_model(config: Config) -> None:
    """A wrong name fails here, before anything has started. The mock executor needs no weights."""
    is_bare = config.engine.weights == "random" or config.executor.kind == "mock"
    locate(config.engine.model, "random" if is_bare else "checkpoint")


def _announce(config: Config, instance: Instance) -> None:
    host = f"[{instance.host}]" if ":" in instance.host else instance.host
    specs = executor_specs(config)
    executors = f" with {', '.join(map(str, specs))}" if len(specs) > 1 else ""
    url = f"http://{host}:{instance.port}"
    print(f"epicycle {instance.version} serves {config.engine.model}{executors} at {url}", flush=True)


def _complain(text: str, exit_code: int) -> int:
    print(f"epicycle serve: {text}", file=sys.stderr, flush=True)
    return exit_code

"""The one error hierarchy of `engine`.

Owns the base class, whose `code` is stable and may appear in logs, exit messages and tests, and one subclass for each
stage that can refuse something a user supplied. Messages name the value, the limit and the knob.
"""

from __future__ import annotations

from typing import Literal

LoadCode = Literal[
    "bad_file",  # a file that can't be read as what it claims to be
    "bad_index",  # the shard index and the shards disagree
    "duplicate_tensor",
    "missing_tensor",
    "missing_weights",
    "not_floating",
    "tensor_value",  # a stored constant or tied copy differs from what it must be
    "unknown_model",
    "unknown_tensor",
    "wrong_shape",
]

ConfigCode = Literal["bad_config", "missing_key", "unknown_key", "unsupported_value"]


class EngineError(Exception):
    """Something the engine refuses; `code` is stable, the text is for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class LoadError(EngineError):
    """A checkpoint that can't be located or loaded as asked."""

    def __init__(self, code: LoadCode, message: str) -> None:
        super().__init__(code, message)


class ConfigError(EngineError):
    """A model config that names something this engine doesn't compute; the text names the key and the value."""

    def __init__(self, code: ConfigCode, message: str) -> None:
        super().__init__(code, message)


ExitRuleCode = Literal["unknown_exit_rule", "needs_gate", "needs_lookahead"]


class ExitRuleError(EngineError):
    """An exit rule that doesn't exist or that the loaded model can't feed."""

    def __init__(self, code: ExitRuleCode, message: str) -> None:
        super().__init__(code, message)


class OptionError(EngineError):
    """An engine option that is out of range, or that model and machine can't meet together."""

    def __init__(self, code: Literal["bad_option"], message: str) -> None:
        super().__init__(code, message)


class SelfCheckError(EngineError):
    """Numerics that this machine doesn't keep equal between a row alone and a row in company."""

    def __init__(self, code: Literal["not_invariant"], message: str) -> None:
        super().__init__(code, message)


class TickError(EngineError):
    """The device failed or is stuck in a tick. Nothing on it can be trusted after that: the process must end."""

    def __init__(self, code: Literal["device_failed", "lost_tick"], message: str) -> None:
        super().__init__(code, message)

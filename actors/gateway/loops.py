"""Loop controls of a request: bounds, threshold, and the prescribed depths of the trace rule.

Bounds touch generated tokens only; prompts always run the model's full depth. Everything a model or rule can't honour
is refused, never ignored.
"""

from __future__ import annotations

from epicycle.actors.gateway.bodies import ChatBody, CompletionBody
from epicycle.actors.gateway.errors import invalid
from epicycle.actors.gateway.ranges import real, whole
from epicycle.actors.gateway.served import Served
from epicycle.transport.wire.columns import U16, pack
from epicycle.transport.wire.control import Capabilities
from epicycle.transport.wire.request import LoopBounds

TRACE_RULE = "trace"


def loop_bounds(body: CompletionBody | ChatBody, served: Served) -> LoopBounds:
    """Bounds and threshold, defaults filled in; without a trace."""
    facts, defaults = served.facts, served.defaults
    depth = f"the model runs {facts.loops} loops"
    max_loops = defaults.max_loops
    if body.max_loops is not None:
        max_loops = whole("max_loops", body.max_loops, 1, facts.loops, limit=depth)
    least = 1 if facts.exit_rule == TRACE_RULE else defaults.min_loops
    min_loops = min(least, max_loops)
    if body.min_loops is not None:
        min_loops = whole("min_loops", body.min_loops, 1, facts.loops, limit=depth)
    if min_loops > max_loops:
        raise invalid("min_loops", f"min_loops is {min_loops}, above max_loops {max_loops}")
    return LoopBounds(min_loops, max_loops, _threshold(body.exit_threshold, served))


def listed_depths(body: CompletionBody | ChatBody, served: Served) -> list[int] | None:
    """The depths that exit_trace or trace_id prescribe; None when neither is given."""
    field = "exit_trace" if body.exit_trace is not None else "trace_id"
    if body.exit_trace is None and body.trace_id is None:
        return None
    rule = served.facts.exit_rule
    if rule != TRACE_RULE:
        raise invalid(field, f"{field} needs exit rule {TRACE_RULE!r}; this server runs {rule!r} (engine.exit_rule)")
    if body.exit_trace is not None and body.trace_id is not None:
        raise invalid("trace_id", "trace_id and exit_trace exclude each other")
    if body.exit_trace is not None:
        if not body.exit_trace:
            raise invalid("exit_trace", "exit_trace is empty; it needs one depth per output")
        return body.exit_trace
    depths = served.files.traces.get(body.trace_id or "")
    if depths is None:
        raise invalid("trace_id", f"trace_id {body.trace_id!r} is not in the server's trace file (server.trace_file)")
    return depths


def with_trace(bounds: LoopBounds, field: str, depths: list[int], max_tokens: int, facts: Capabilities) -> LoopBounds:
    """`bounds` with the depths of `max_tokens` outputs. Raises ApiError for a trace that can't be followed."""
    if len(depths) < max_tokens:
        raise invalid(field, f"{field} lists {len(depths)} depths, max_tokens is {max_tokens}: it needs one per output")
    depths = depths[:max_tokens]
    if depths and depths[0] != facts.loops:
        text = f"{field}[0] is {depths[0]}, must be {facts.loops}: the first output comes from the prompt's last token"
        raise invalid(field, f"{text}, which runs the model's full depth")
    for at, depth in enumerate(depths[1:], start=1):
        if not bounds.min_loops <= depth <= bounds.max_loops:
            limits = f"between min_loops {bounds.min_loops} and max_loops {bounds.max_loops}"
            raise invalid(field, f"{field}[{at}] is {depth}, must be {limits}")
    return LoopBounds(bounds.min_loops, bounds.max_loops, bounds.exit_threshold, pack(U16, depths))


def _threshold(asked: float | None, served: Served) -> float:
    threshold = real("exit_threshold", asked, served.defaults.exit_threshold)
    facts = served.facts
    if asked is not None and asked < 1 and not facts.can_exit_early:
        text = f"exit_threshold is {asked}, but {facts.model_id} with exit rule {facts.exit_rule!r} can't exit early"
        raise invalid("exit_threshold", f"{text}: leave it out or send 1.0 (engine.exit_rule)")
    return threshold

"""The commands of `epicycle`: name -> (module, one line of help). A module is imported only when its command runs."""

from __future__ import annotations

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("epicycle.tools.serve", "serve a model over HTTP until stopped"),
    "health": ("epicycle.tools.health", "ask a running server how each of its actors is"),
    "generate": ("epicycle.tools.generate", "one answer, token by token, with the depth of each token"),
    "plan": ("epicycle.tools.plan", "what a model's weights and KV cost, and what fits"),
    "bench": ("epicycle.tools.bench", "run named workloads beside their computed floor"),
    "bench-hop": ("epicycle.tools.bench_hop", "the host path's tokens a second beside a bare SSE server's"),
    "bench-kernels": ("epicycle.tools.bench_kernels", "check, tune and time the GPU kernels on one card"),
    "bench-split": ("epicycle.tools.bench_split", "a workload with prompts and tokens on different executors"),
    "replay": ("epicycle.tools.replay", "replay a trace of sessions and see where time, loops and cache hits went"),
    "verify": ("epicycle.tools.verify", "count requests whose bits depend on their company"),
    "exit-table": ("epicycle.tools.exit_table", "loops, loss and speed by exit threshold"),
}


def usage() -> str:
    """What `epicycle --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: epicycle COMMAND [...]", "", *lines, "", "epicycle COMMAND --help tells more."])

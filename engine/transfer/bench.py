"""How fast NIXL writes between two processes, by the size of a segment, beside a copy on the device itself.

    python -m epicycle.engine.transfer.bench --from cuda:0 --to cuda:1

Two processes, each with a pool of its own; every write moves the same bytes in segments of one size, merged from
blocks that follow each other on both sides. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from epicycle.engine.transfer.blocks import Blocks, BlockShape, Numbers
from epicycle.engine.transfer.memory import Memory
from epicycle.engine.transfer.nixl import NixlConnector
from epicycle.transport.codec import Decoder, encode
from epicycle.transport.wire.transfer import Arrived, Meet

BLOCK_BYTES = 64 << 10
REPEATS = 7
WARM_UP = 2
STEP_S = 1e-5


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    torch.set_grad_enabled(False)
    if arguments.serve:
        return serve(arguments)
    say(json.dumps(measure(arguments)))
    return 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m epicycle.engine.transfer.bench", description=__doc__)
    made.add_argument("--from", dest="source", default="cpu", metavar="DEVICE")
    made.add_argument("--to", dest="target", default="cpu", metavar="DEVICE")
    made.add_argument("--bytes", type=int, default=256 << 20, help="of one write")
    made.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return made


def make_memory(device: str, write_bytes: int) -> Memory:
    """A pool of single blocks, with room for a write of them with as many gaps."""
    shape = BlockShape(((0, 1),), (0,), slots_per_page=1, page_tokens=1, cell_bytes=BLOCK_BYTES, head_bytes=64)
    size = 2 * write_bytes + BLOCK_BYTES
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    tensors = {name: torch.zeros(size, dtype=torch.uint8, device=device) for name in ("k", "v")}
    tensors["heads"] = torch.zeros(1, 64, dtype=torch.uint8, device=device)
    k, v, heads = ((tensors[name].data_ptr(), tensors[name].nbytes) for name in ("k", "v", "heads"))
    return Memory(tensors, Blocks(shape, k, v, heads))


def serve(arguments: argparse.Namespace) -> int:
    """The process that is written to: its Meet goes out, the other's comes in, and it stays until told."""
    connector = NixlConnector(make_memory(arguments.target, arguments.bytes), "target", 1)
    say(encode(connector.meet("target", 1)).hex())
    connector.connect(read_meet(sys.stdin.readline()))
    say("met")
    sys.stdin.read()
    connector.close()
    return 0


def read_meet(line: str) -> Meet:
    decode: Decoder[Meet] = Decoder(Meet)
    return decode(bytes.fromhex(line))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    words = [sys.executable, "-m", "epicycle.engine.transfer.bench", "--serve", "--to", arguments.target]
    child = subprocess.Popen(
        [*words, "--bytes", str(arguments.bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.closing(child.stdin):
        memory = make_memory(arguments.source, arguments.bytes)
        connector = NixlConnector(memory, "source", 1)
        meet = read_meet(child.stdout.readline())
        child.stdin.write(encode(connector.meet("source", 1)).hex() + "\n")
        child.stdin.flush()
        child.stdout.readline()
        connector.connect(meet)
        sizes = [1 << shift for shift in range(0, (arguments.bytes // BLOCK_BYTES).bit_length(), 2)]
        sizes = sorted({*sizes, 24, 96, arguments.bytes // BLOCK_BYTES})
        rows = [rate_of(connector, run, arguments.bytes) for run in sizes if run * BLOCK_BYTES <= arguments.bytes]
    connector.close()
    child.wait(30)
    return {
        "bench": "transfer",
        "from": arguments.source,
        "to": arguments.target,
        "write_bytes": arguments.bytes,
        "copy_bytes_per_s": copy_rate(arguments.source, arguments.target, arguments.bytes),
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "writes": rows,
    }


def rate_of(connector: NixlConnector, run: int, size: int) -> dict[str, float]:
    """Writes of `size` bytes in segments of `run` blocks."""
    blocks = spaced(run, size // BLOCK_BYTES)
    tag = msgspec.msgpack.encode(Arrived(0, 0, b""))

    def write() -> None:
        posted = connector.write("target", blocks, blocks, tag)
        while not posted.is_done():
            time.sleep(STEP_S)
        posted.release()

    seconds = timed(write)
    return {"segment_bytes": run * BLOCK_BYTES, "segments": -(-len(blocks) // run), "bytes_per_s": size / seconds}


def spaced(run: int, count: int) -> Numbers:
    """`count` block numbers in runs of `run`, one block left out between them."""
    numbers = np.arange(count, dtype=np.int64)
    return numbers + numbers // run if run < count else numbers


def timed(work: Callable[[], None]) -> float:
    """Seconds of one, the median of several."""
    seconds = []
    for _ in range(WARM_UP + REPEATS):
        started_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds[WARM_UP:])


def copy_rate(source: str, target: str, size: int) -> float:
    """Bytes a second of one process's own copy between the two devices."""
    a, b = (torch.zeros(size, dtype=torch.uint8, device=device) for device in (source, target))

    def copy() -> None:
        b.copy_(a)
        for device in {source, target}:
            if device.startswith("cuda"):
                torch.cuda.synchronize(device)

    return size / timed(copy)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

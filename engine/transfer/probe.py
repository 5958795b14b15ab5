"""How fast the way to a peer is: measured once, when the two meet.

Writes this side's zero page over the peer's, which holds the same zeros and is read by everybody and owned by nobody,
so that no page needs to be free. Runs on the port's thread, before any transfer with that peer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from epicycle.engine.transfer.blocks import Blocks
from epicycle.engine.transfer.connector import Connector, TransferError
from epicycle.transport.codec import encode
from epicycle.transport.wire.transfer import Arrived

PROBE = 0  # the number that no transfer has
TRIES = 4
MOST_S = 10.0  # for one of them
STEP_S = 1e-5


def measure(connector: Connector, peer: str, there: Blocks, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes a second of the best of a few writes of one page. Raises TransferError."""
    here, planes = connector.blocks, np.arange(len(connector.blocks.shape.planes), dtype=np.int64)
    source, target = (blocks.whole(np.full_like(planes, blocks.pages - 1), planes) for blocks in (here, there))
    size = int(here.spans(source)[1].sum())
    best_s = MOST_S
    for part in range(TRIES):
        started_s = clock()
        write = connector.write(peer, source, target, encode(Arrived(PROBE, part, b"")))
        while not write.is_done():
            if clock() - started_s > MOST_S:
                raise TransferError("transfer_error", f"{size} bytes did not reach {peer} within {MOST_S} s")
            time.sleep(STEP_S)
        write.release()
        best_s = min(best_s, clock() - started_s)
    return size / max(best_s, 1e-9)

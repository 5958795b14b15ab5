"""Executor <-> executor: the KV of a prompt, from the executor that computed it (P) to the one that decodes (D).

Who says what to whom, in order. Control's part travels in Plan and StepReport, the rest over the `transfer` link that
every executor with `Capabilities.transfer` binds; the bytes themselves go by the connector (NIXL, or a copy inside one
process).

1. At start: the supervisor compares `Capabilities.transfer` of executors that will meet (`mismatch`) and stops the
   server with `split_mismatch` where they differ. It tells each of the others (PeerUp); each sends them `Meet`.
2. Control takes a slot and pages on D, a slot and prompt pages on P, and a transfer id never used before. D gets a
   Join with `imports`, P one with `exports`. Either may come first. D's row waits, counted, and holds its slot and
   pages; P's row computes the prompt and nothing else: it samples nothing and its gateway never hears of it.
3. D -> P `Reserved`, once nothing on D can touch the pages any more. P writes no byte before it has this.
4. P writes each (page, plane) once, as it becomes complete; every write carries an `Arrived`, which the connector
   delivers after its bytes. The last partial page sends its valid tokens only. The head row (what the first token is
   sampled from) goes last.
5. P -> D `Commit` when everything has been posted. When the Arrived parts are complete and agree with it and with D's
   own count of the bytes, D activates the row, reports it as moved to the prompt's length, and answers `Ack`.
6. P frees slot and pages after Ack, and reports them freed as any other row; that its prompt is written it has
   reported before, so both prefix indexes learn of it in the usual way.

What goes wrong:

- Control evicts the row on both sides. D ends it (its Fin is the terminal; `is_silent`: see Evict) and sends
  `StopWrites`; P posts nothing more, lets what is posted end and answers `WritesEnded`; only then, or when P is down,
  does D report the slot freed. P frees when its posted writes have ended, Ack or no Ack.
- A transfer fails at one side (an error of the connector, bytes that don't add up, nothing moved for
  `transfer.idle_s`): that side names it in `StepReport.failed`, and control decides: Evict on both sides, silently
  where no token was sent and the request is to run again. Rows stay until then. A failing P tells D with WritesEnded.
- An executor dies: the other gets PeerDown, reports the transfers it shared with it as failed (`peer_down`), and keeps
  everything else. Writes of a dead P have ended.
- Reset: both sides drop their rows; the next Plan is obeyed once no write touches the pool.
- Prompts whose logprobs are wanted, and those of `max_tokens` 0, are computed by D itself: control sends it a Join with
  neither part. So does it where D's prefix leaves little to compute.

Ids that nobody knows (any more) are answered as if all were over: StopWrites by WritesEnded, the rest is dropped and
counted. So late messages are harmless.
"""

from __future__ import annotations

from epicycle.transport.wire.base import Wire


class Import(Wire, frozen=True):
    """Part of D's Join: the prompt's KV behind `Join.prefix_tokens` (whole pages that D has) comes from `source`."""

    transfer: int
    source: str  # P's name, "ex0"
    source_epoch: int


class Export(Wire, frozen=True):
    """Part of P's Join: write the prompt's KV to `target`. `Join.pages` cover the prompt."""

    transfer: int
    target: str  # D's name
    target_epoch: int


class TransferFailure(Wire, frozen=True):
    """Part of a StepReport: this side can't complete `transfer`. `code`: peer_down, transfer_error, transfer_idle,
    bad_coverage."""

    transfer: int
    code: str
    message: str


class TransferFacts(Wire, frozen=True):
    """Part of Capabilities: what must be equal on both sides for KV to be exchanged and local = split to hold."""

    model: str
    weights: str  # SHA-256 over the files
    weights_checksum: str  # of the weights as they lie on the device
    dtype: str
    layout: str  # name, packed or not, page tokens, loops
    live_slots: str  # start, first layer and slots of every plane
    capability: str  # "cpu", "cuda 9.0"
    torch: str
    triton: str
    numerics: str  # invariant or fast, and the id of the canonical order of sums
    connector: str  # nixl UCX, copy


def mismatch(ours: TransferFacts, theirs: TransferFacts) -> str:
    """The facts in which two executors differ, with both values; empty where they may exchange KV."""
    pairs = ((name, getattr(ours, name), getattr(theirs, name)) for name in TransferFacts.__struct_fields__)
    return "; ".join(f"{name} is {mine!r} here and {other!r} there" for name, mine, other in pairs if mine != other)


class Region(Wire, frozen=True):
    """Registered memory of one executor: `bytes` from `address` on."""

    name: str  # k, v, heads
    address: int
    bytes: int


class Meet(Wire, frozen=True, tag=80):
    """First word to a peer, once a PeerUp: where this executor's memory lies and how to reach it. `agent` is the
    connector's own metadata; `memory` its kind (DRAM, VRAM)."""

    name: str
    epoch: int
    agent: bytes
    memory: str
    device: int
    regions: list[Region]


class Reserved(Wire, frozen=True, tag=81):
    """D -> P: write positions `first_token` (a page's first) .. `prompt_tokens` - 1 of `transfer` into `pages` (I32,
    the table from `first_token` on), and the head row into row `head_row`."""

    name: str
    epoch: int
    transfer: int
    prompt_tokens: int
    first_token: int
    pages: bytes
    head_row: int


class Arrived(Wire, frozen=True, tag=82):
    """Carried by a write: its bytes are in place. `runs` I32 in threes: first page of the request, pages, plane; plane
    -1 stands for the head row."""

    transfer: int
    part: int  # from 0 on
    runs: bytes


class Commit(Wire, frozen=True, tag=83):
    """P -> D: everything has been posted, in so many parts and bytes."""

    transfer: int
    parts: int
    bytes: int


class Ack(Wire, frozen=True, tag=84):
    """D -> P: the row runs."""

    transfer: int


class StopWrites(Wire, frozen=True, tag=85):
    """D -> P: the row is gone or given up. `name` is D's."""

    transfer: int
    name: str = ""


class WritesEnded(Wire, frozen=True, tag=86):
    """P -> D: no byte of `transfer` will be written any more. With a `code` P gave it up by itself."""

    transfer: int
    code: str = ""
    message: str = ""


ToPeer = Meet | Reserved | Commit | Ack | StopWrites | WritesEnded

"""Kernels compiled for a Hopper GPU on any machine, and what the machine code says about them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

TARGET = GPUTarget("cuda", 90, 32)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
H, F, I, L, N = "*bf16", "*fp32", "*i32", "*i64", "i32"  # noqa: E741
ROWS = {"slots_ptr": I, "positions_ptr": I, "page_table_ptr": I, "table_stride": N, "slots_per_page": N}
"""Types of arguments, and of those that say where rows are."""


@dataclass(frozen=True, slots=True)
class Compiled:
    registers: int
    stack_bytes: int
    shared_bytes: int
    sass: str

    @property
    def spills(self) -> int:
        """Loads and stores of thread-local memory."""
        return len(re.findall(r"\b(?:STL|LDL)\b", self.sass))

    @property
    def barriers(self) -> set[int]:
        """Places in shared memory where barriers are made."""
        return {int(at, 16) & ~7 for at in re.findall(r"SYNCS\.EXCH\.64 URZ, \[U?R\d+\+(0x[0-9a-f]+)\]", self.sass)}

    @property
    def stores_on_barriers(self) -> list[str]:
        """Stores to shared memory, at a known place, where a barrier is made."""
        barriers = self.barriers
        stores = re.finditer(r"\bSTS(?:\.\w+)* \[U?R\d+\+(0x[0-9a-f]+)\]", self.sass)
        return [store[0] for store in stores if int(store[1], 16) & ~7 in barriers]


def compiled(
    kernel: Any, arguments: Mapping[str, str], constants: Mapping[str, object], path: Path, **options: object
) -> Compiled:
    """`arguments` name their types; pointers and names ending in "16" are taken as multiples of 16. `path` is a folder
    to write to."""
    types = {name.removesuffix("16"): kind for name, kind in arguments.items()}
    divisible = {name.removesuffix("16") for name, kind in arguments.items() if name.endswith("16") or kind[0] == "*"}
    order = [parameter.name for parameter in kernel.params]
    signature = {name: types.get(name, "constexpr") for name in order}
    attributes = {(order.index(name),): [["tt.divisibility", 16]] for name in divisible}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, dict(constants), attributes)
    options.setdefault("enable_fp_fusion", True)
    binary = triton.compile(source, target=TARGET, options=options)
    file = path / "kernel.cubin"
    file.write_bytes(binary.asm["cubin"])
    usage = _dump("--dump-resource-usage", file)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    made = Compiled(int(found[1]), int(found[2]), int(binary.metadata.shared), _dump("--dump-sass", file))
    # Triton gives the place of a barrier that nobody waits for to others, who were seen to find the barrier's word
    # there after the card had been with another process.
    assert not made.stores_on_barriers
    return made


def _dump(option: str, file: Path) -> str:
    run = subprocess.run([str(TOOLS / "cuobjdump"), option, str(file)], capture_output=True, text=True, check=True)
    return run.stdout

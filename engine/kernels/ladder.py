"""Which implementation runs a matrix product at which number of rows.

Owns the ladder of row counts and the start-up choice: for every product and step the fastest implementation whose rows
are all bit-equal to the sure one, which is always there to fall back to. Must not know torch or Triton: running,
comparing and timing are a `Probe`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from epicycle.engine.kernels.candidates import EARLY_KERNELS, EARLY_ROWS, candidates, sure
from epicycle.engine.kernels.products import EXACT, LIBRARY, GemmConfig, Product

STEPS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Row counts that are checked and timed. A call uses the choice of the first step that holds its rows."""
LATE_US = 1.5  # what a launch that isn't early loses at either end where the others are: no product alone shows it


def step_for(rows: int) -> int:
    """The first step of the ladder that holds `rows`; the last one for more."""
    return next((step for step in STEPS if step >= rows), STEPS[-1])


class Probe(Protocol):
    """Runs products on the device for `choose`. `rows` are always the same first rows of one fixed input."""

    def is_equal(self, product: Product, config: GemmConfig, rows: int) -> bool:
        """True when every one of `rows` rows has the sure implementation's bits, also in shuffled order."""
        ...

    def time_us(self, product: Product, config: GemmConfig, rows: int) -> float:
        """Median time of one product with weights that no cache holds."""
        ...


@dataclass(slots=True)
class Choices:
    """The picked configuration of every (product name, step), the same among those that read a count, what was refused
    for its bits, and the numbers of rows between steps that the library may be handed as they are, by product name.
    `turned` are those of QKV products that turn their rows, where that is faster than a launch behind them."""

    picked: dict[tuple[str, int], GemmConfig] = field(default_factory=dict)
    counted: dict[tuple[str, int], GemmConfig] = field(default_factory=dict)
    refused: list[tuple[str, int, str]] = field(default_factory=list)
    exact: dict[str, frozenset[int]] = field(default_factory=dict)
    turned: dict[tuple[str, int], GemmConfig] = field(default_factory=dict)

    def find(self, product: Product, rows: int) -> GemmConfig | None:
        """What to run, if anything was picked."""
        found = self.picked.get((product.name, step_for(rows)))
        return EXACT if found == LIBRARY and rows in self.exact.get(product.name, ()) else found

    def find_counted(self, product: Product, rows: int) -> GemmConfig | None:
        """What to run where the device knows how many of `rows` there are, if anything was picked."""
        return self.counted.get((product.name, step_for(rows)))

    def find_turned(self, product: Product, rows: int) -> GemmConfig | None:
        """What to run where a QKV product is to turn its rows, if anything was picked."""
        return self.turned.get((product.name, step_for(rows)))

    def told(self) -> dict[str, dict[str, str]]:
        """For records: what runs, by product's name and step. Times decide, so that another start may tell others."""
        found: dict[str, dict[str, str]] = {}
        for (name, step), config in (self.picked | self.turned).items():
            found.setdefault(name, {})[str(step)] = config.key
        return found

    def get(self, product: Product, rows: int) -> GemmConfig:
        """What to run; the sure one where nothing was picked."""
        return self.find(product, rows) or sure(product)


def choose(products: list[Product], steps: list[int], probe: Probe, *, keeps_bits: bool = True) -> Choices:
    """Time every candidate of every product and step and keep the fastest of those that are bit-equal, and the fastest
    of them that reads a count.

    Bits are compared from the fastest candidate down, so that slow ones aren't checked for nothing. One that can't run
    on this device must answer infinity as its time. Without `keeps_bits` the fastest is taken whatever its bits, and
    the library is a candidate for every product.
    """
    choices = Choices()
    for product in products:
        for step in steps:
            tried = _all(product, step) if keeps_bits else {*_all(product, step), LIBRARY}
            timed = sorted((_time_us(probe, product, config, step), config.key, config) for config in tried)
            for time_us, key, config in timed:
                at = product.name, step
                if time_us == float("inf") or at in choices.counted:
                    break
                if at in choices.picked and not config.reads_count:
                    continue
                if keeps_bits and config != sure(product) and not probe.is_equal(product, config, step):
                    choices.refused.append((*at, key))
                    continue
                choices.picked.setdefault(at, config)
                if config.reads_count:
                    choices.counted[at] = config
    return choices


def _time_us(probe: Probe, product: Product, config: GemmConfig, step: int) -> float:
    """As in a loop."""
    is_late = step <= EARLY_ROWS and config.kernel not in EARLY_KERNELS
    return probe.time_us(product, config, step) + LATE_US * is_late


def _all(product: Product, step: int) -> tuple[GemmConfig, ...]:
    found = candidates(product, step)
    return found if sure(product) in found else (*found, sure(product))

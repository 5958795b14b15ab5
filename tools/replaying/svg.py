"""Small plots as SVG text: axes, curves, bars, and spans in lanes. No scripts, no files, nothing from elsewhere.

Owns sizes, ticks and colours. It must not know what is plotted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 44
NAMES = 104  # left of a timeline's lanes
COLOURS = ("#2f6fb3", "#c4552d", "#3a8f5c", "#8a5aa8")
Point = tuple[float, float]
Scale = Callable[[float], float]


def curves(named: dict[str, Sequence[Point]], x_label: str, y_label: str) -> str:
    """Lines over a logarithmic x axis; y from 0 to 1."""
    xs = [x for points in named.values() for x, _ in points if x > 0]
    if not xs:
        return nothing()
    low, high = min(xs), max(max(xs), 1.0001 * min(xs))
    x_of = _log(low, high)
    body = _frame(x_label, y_label) + _y_ticks(1.0, lambda value: f"{value:.0%}") + _log_ticks(low, high, x_of)
    for number, (name, points) in enumerate(named.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x_of(max(x, low)):.1f},{_y(y, 1.0):.1f}" for x, y in points)
        body += f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>'
        body += _text(WIDTH - RIGHT - 8, HEIGHT - BOTTOM - 10 - 16 * number, name, "end", colour)
    return _svg(HEIGHT, body)


def bars(values: Sequence[tuple[str, float | None]], x_label: str, y_label: str, *, is_share: bool = False) -> str:
    """One bar a value, None leaves a gap."""
    numbers = [value for _, value in values if value is not None]
    if not numbers:
        return nothing()
    most = 1.0 if is_share else max(numbers) or 1.0
    step = (WIDTH - LEFT - RIGHT) / len(values)
    body = _frame(x_label, y_label) + _y_ticks(most, (lambda value: f"{value:.0%}") if is_share else short)
    every = max(1, math.ceil(len(values) / 16))
    for number, (name, value) in enumerate(values):
        x = LEFT + number * step
        if value is not None:
            y = _y(value, most)
            title = f"<title>{escape(name)}: {f'{value:.1%}' if is_share else short(value)}</title>"
            size = f'width="{max(1.0, 0.8 * step):.1f}" height="{HEIGHT - BOTTOM - y:.1f}"'
            body += f'<rect x="{x + 0.1 * step:.1f}" y="{y:.1f}" {size} fill="{COLOURS[0]}">{title}</rect>'
        if number % every == 0:
            body += _text(x + step / 2, HEIGHT - BOTTOM + 14, name, "middle")
    return _svg(HEIGHT, body)


class Lane:
    """One row of a timeline: (begin, end, colour, what it says) in milliseconds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spans: list[tuple[float, float, str, str]] = []


def timeline(lanes: Sequence[Lane], x_label: str) -> str:
    """Spans in lanes below each other, over one axis of time."""
    ends = [end for lane in lanes for _, end, _, _ in lane.spans]
    if not ends:
        return nothing()
    begin = min(begin for lane in lanes for begin, _, _, _ in lane.spans)
    last = max(*ends, begin + 1e-3)
    lane_px = 14 if len(lanes) <= 32 else 9
    height = TOP + BOTTOM + lane_px * len(lanes)

    def x_of(value: float) -> float:
        return NAMES + (value - begin) / (last - begin) * (WIDTH - NAMES - RIGHT)

    body = ""
    for number, lane in enumerate(lanes):
        y = TOP + number * lane_px
        body += _text(NAMES - 4, y + lane_px - 3, _end_of(lane.name), "end", size=min(8, lane_px))
        for start, end, colour, title in lane.spans:
            width = max(0.8, x_of(end) - x_of(start))
            place = f'x="{x_of(start):.1f}" y="{y + 1}" width="{width:.1f}" height="{lane_px - 2}"'
            body += f'<rect {place} fill="{colour}"><title>{escape(title)}</title></rect>'
    for tick in range(6):
        value = begin + (last - begin) * tick / 5
        anchor = "end" if tick == 5 else "middle"
        body += _text(x_of(value), height - BOTTOM + 16, f"{short((value - begin) / 1e3)} s", anchor)
    body += _text((LEFT + WIDTH - RIGHT) / 2, height - 8, x_label, "middle")
    return _svg(height, body)


def _end_of(name: str) -> str:
    return name if len(name) <= 24 else f"…{name[-23:]}"


def nothing() -> str:
    return _svg(48, _text(WIDTH / 2, 28, "nothing to show", "middle"))


def short(value: float) -> str:
    """Three significant digits, without an exponent where it can be read."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _svg(height: float, body: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" xmlns="http://www.w3.org/2000/svg" role="img">{body}</svg>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#444", size: float = 11) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:g}"'
    return f'<text {place} fill="{colour}">{escape(text)}</text>'


def _frame(x_label: str, y_label: str) -> str:
    down = HEIGHT - BOTTOM
    lines = f'<path d="M{LEFT} {TOP}V{down}H{WIDTH - RIGHT}" fill="none" stroke="#888"/>'
    turned = f'<g transform="translate(14 {(TOP + down) / 2:.0f}) rotate(-90)">{_text(0, 0, y_label, "middle")}</g>'
    return lines + turned + _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, "middle")


def _y(value: float, most: float) -> float:
    return HEIGHT - BOTTOM - value / most * (HEIGHT - BOTTOM - TOP)


def _y_ticks(most: float, say: Callable[[float], str]) -> str:
    body = ""
    for tick in range(5):
        value = most * tick / 4
        y = _y(value, most)
        body += f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>'
        body += _text(LEFT - 6, y + 4, say(value), "end")
    return body


def _log(low: float, high: float) -> Scale:
    span = math.log(high / low)
    return lambda value: LEFT + math.log(value / low) / span * (WIDTH - LEFT - RIGHT)


def _log_ticks(low: float, high: float, x_of: Scale) -> str:
    body = ""
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for lead in (1, 2, 5):
            value = lead * 10.0**power
            if low <= value <= high:
                x = x_of(value)
                body += f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#f0f0f0"/>'
                body += _text(x, HEIGHT - BOTTOM + 14, short(value), "middle")
    return body

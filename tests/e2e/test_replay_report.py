"""The report of a replay, looked at in a headless Chromium: what should be drawn is drawn, names do no harm."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from epicycle.tools.replaying.report import DECODE, PROMPT, WAIT
from tests.e2e.test_replay import replayed, sessions, written
from tests.fakes.replay import row

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
WIDTH, HEIGHT = 640, 1800
Pixel = tuple[int, int, int]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (apt-get install chromium): no report was looked at"),
]


def browse(page: Path, *words: str) -> str:
    command = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--hide-scrollbars", "--force-device-scale-factor=1", f"--user-data-dir={page.parent / 'profile'}",
        f"--window-size={WIDTH},{HEIGHT}", *words, page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout


def colours(png: bytes) -> dict[Pixel, int]:
    """How often each colour is on a picture of 8 bits a channel."""
    chunks, at = {b"IDAT": b""}, 8
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        kind = png[at + 4 : at + 8]
        chunks[kind] = chunks.get(kind, b"") + png[at + 8 : at + 8 + size]
        at += size + 12
    width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    step = {2: 3, 6: 4}[colour]
    assert 8 == depth
    raw, counts = zlib.decompress(chunks[b"IDAT"]), dict[Pixel, int]()
    above = bytearray(width * step)
    for y in range(height):
        start = y * (width * step + 1)
        above = unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + width * step]), above, step)
        for x in range(0, width * step, step):
            pixel = (above[x], above[x + 1], above[x + 2])
            counts[pixel] = counts.get(pixel, 0) + 1
    return counts


def unfiltered(kind: int, line: bytearray, above: bytearray, step: int) -> bytearray:
    """One line of a PNG, its filter undone."""
    for x in range(len(line)):
        left, up = line[x - step] if x >= step else 0, above[x]
        corner = above[x - step] if x >= step else 0
        nearest = min((left, up, corner), key=lambda value: abs(left + up - corner - value))
        line[x] = (line[x] + (0, left, up, (left + up) // 2, nearest)[kind]) & 255
    return line


def rgb(colour: str) -> Pixel:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


async def test_a_browser_draws_the_report(base_url: str, tmp_path: Path) -> None:
    report, picture = tmp_path / "report.html", tmp_path / "report.png"
    rows = [*sessions(4, 3), row("x", "<img src=x onerror=alert(1)>", tool_wait_ms=50.0)]
    await replayed(base_url, written(tmp_path, [*rows, *sessions(0, 0)]), "--report", str(report))

    dom = browse(report, "--dump-dom")
    assert 5 == dom.count("<svg")
    assert "<img" not in dom
    assert "NaN" not in dom

    browse(report, f"--screenshot={picture}")
    drawn = colours(picture.read_bytes())
    assert WIDTH * HEIGHT == sum(drawn.values())
    for what, colour in (("prompt", PROMPT), ("decode", DECODE), ("wait", WAIT)):
        assert drawn.get(rgb(colour), 0) > 100, what

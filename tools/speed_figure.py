"""Draw the README's figure from the tables of docs/results.md: `python tools/speed_figure.py` writes docs/speed.svg."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
MODEL = "SmolLM2"  # in the heading of the model whose table is drawn
COLUMNS = ("precision", "method", "tok/s")  # of the table that compares engines
BARS = (  # what runs, precision and method of a row of the table -> label
    ("pytorch", "fp32", "eager", "PyTorch, fp32"),
    ("llama.cpp", "q8_0", "plain", "llama.cpp, q8_0"),
    ("onnxruntime-genai", "int8", "plain", "onnxruntime-genai, int8"),
    ("eagle-edge", "int8, head int4", "vanilla", "eagle-edge, int8, without drafts"),
    ("eagle-edge", "int8, head int4", "eagle+lookup", "eagle-edge, int8, with drafts (default)"),
    ("llama.cpp", "q4_0", "plain", "llama.cpp, q4_0"),
    ("onnxruntime-genai", "int4", "plain", "onnxruntime-genai, int4"),
    ("eagle-edge", "int4", "vanilla", "eagle-edge, int4, without drafts"),
    ("eagle-edge", "int4", "eagle+lookup", "eagle-edge, int4, with drafts (default)"),
)
CAPTION = (
    "SmolLM2-135M-Instruct, 30 layers x 576, one token after another and with drafts",
    "medians over prompts with 95 % intervals, from docs/results.md",
)
LEFT, WIDTH, TOP, STEP = 280, 400, 60, 30  # of the bars, in pixels


@dataclass(frozen=True)
class Bar:
    """Tokens per second with the 95 % interval."""

    label: str
    speed: float
    low: float
    high: float


def read_bars(results: str) -> list[Bar]:
    """The bars from the text of docs/results.md. Raises ValueError where a row is missing."""
    section = next(part for part in re.split(r"^## ", results, flags=re.M)[1:] if MODEL in part.splitlines()[0])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    (header,) = (row for row in rows if row[1:4] == list(COLUMNS))
    bars = []
    for program, precision, method, label in BARS:
        (row,) = (row for row in rows if row[:3] == [program, precision, method] and len(row) == len(header))
        speed, low, high = map(float, re.findall(r"[\d.]+", row[3]))
        bars.append(Bar(label, speed, low, high))
    return bars


def draw(bars: list[Bar]) -> str:
    """An SVG of horizontal bars with their intervals."""
    scale = WIDTH / max(bar.high for bar in bars)
    height = TOP + STEP * len(bars) + 8
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 60} {height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{LEFT + WIDTH + 60}" height="{height}" fill="white"/>',
        '<text x="12" y="18" font-weight="bold">Tokens per second, greedy, two threads of a CPU with AVX2 alone</text>',
        *(
            f'<text x="12" y="{35 + 14 * index}" font-size="11" fill="#666">{line}</text>'
            for index, line in enumerate(CAPTION)
        ),
    ]
    for index, bar in enumerate(bars):
        y = TOP + STEP * index
        colour = "#3b7dd8" if bar.label.startswith("eagle") else "#b8c0cc"
        end, middle = LEFT + bar.speed * scale, y + 11
        out.append(
            f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{bar.label}</text>'
            f'<rect x="{LEFT}" y="{y}" width="{end - LEFT:.1f}" height="22" fill="{colour}"/>'
            f'<path d="M{LEFT + bar.low * scale:.1f} {middle}H{LEFT + bar.high * scale:.1f}" stroke="#222"/>'
            f'<text x="{LEFT + bar.high * scale + 6:.1f}" y="{y + 15}">{bar.speed:.0f}</text>'
        )
    return "\n".join([*out, "</svg>", ""])


def main() -> int:
    """Write the figure; returns the exit status."""
    (DOCS / "speed.svg").write_text(
        draw(read_bars((DOCS / "results.md").read_text(encoding="utf-8"))), encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Draw the README's figure and write its table from the tables of docs/results.md.

python tools/speed_figure.py
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS, README = ROOT / "docs", ROOT / "README.md"
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
TABLE = (  # what runs, precision, its plain method -> label
    ("eagle-edge", "int4", "vanilla", "eagle-edge int4"),
    ("eagle-edge", "stored, head int4", "vanilla", "eagle-edge stored"),
    ("eagle-edge", "int8, head int4", "vanilla", "eagle-edge int8"),
    ("onnxruntime-genai", "int4", "plain", "onnxruntime-genai int4"),
    ("llama.cpp", "q4_0", "plain", "llama.cpp q4_0"),
    ("onnxruntime-genai", "int8", "plain", "onnxruntime-genai int8"),
    ("llama.cpp", "q8_0", "plain", "llama.cpp q8_0"),
    ("pytorch", "fp32", "eager", "PyTorch fp32"),
)
NAMES = {"eagle+lookup": "drafts"}  # of methods in the README's table
PROCESSOR = re.compile(r"^- (.*), 2 threads$", re.M)  # where results were measured
HEADER = "| tokens per second | plain | fastest mode | bits per weight | as PyTorch fp32 |\n|---|--:|--:|--:|--:|\n"
OLD_TABLE = re.compile(re.escape(HEADER) + r"(?:\|.*\n)*")
LEFT, WIDTH, TOP, STEP = 280, 400, 60, 30  # of the bars, in pixels


@dataclass(frozen=True)
class Bar:
    """Tokens per second with the 95 % interval."""

    label: str
    speed: float
    low: float
    high: float


def rows_of(results: str) -> list[list[str]]:
    """The table that compares engines on MODEL, its header first, from the text of docs/results.md."""
    section = next(part for part in re.split(r"^## ", results, flags=re.M)[1:] if MODEL in part.splitlines()[0])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    (header,) = (row for row in rows if row[1:4] == list(COLUMNS))
    return [header, *(row for row in rows if len(row) == len(header) and row != header)]


def read_bars(results: str) -> list[Bar]:
    """The bars from the text of docs/results.md. Raises ValueError where a row is missing."""
    rows, bars = rows_of(results), []
    for program, precision, method, label in BARS:
        (row,) = (row for row in rows if row[:3] == [program, precision, method])
        speed, low, high = map(float, re.findall(r"[\d.]+", row[3]))
        bars.append(Bar(label, speed, low, high))
    return bars


def readme_table(results: str) -> str:
    """The README's table from the text of docs/results.md: plain decoding, the fastest mode of each engine, bits per
    weight and the share of the text before the first token that differs from PyTorch's. Raises ValueError where a row
    is missing."""
    header, *rows = rows_of(results)
    known = {tuple(row[:3]): row for row in rows}
    lines = []
    for program, precision, plain, label in TABLE:
        speeds = {key[2]: _speed(row) for key, row in known.items() if key[:2] == (program, precision)}
        if plain not in speeds:
            raise ValueError(f"{label} has the methods {speeds}, without {plain!r}")
        best = max(speeds, key=speeds.__getitem__)
        row = known[program, precision, best]
        bits, same = row[header.index("bits per weight")], row[header.index("before the first difference from PyTorch")]
        fastest = f"{speeds[best]:.0f}" + ("" if best == plain else f" ({NAMES.get(best, best)})")
        lines.append(f"| {label} | {speeds[plain]:.0f} | {fastest} | {bits.replace('-', '32')} | {same} |\n")
    return HEADER + "".join(lines)


def _speed(row: list[str]) -> float:
    return float(row[3].split()[0])


def processor(results: str) -> str:
    """The processor from the text of docs/results.md. Raises ValueError where it is missing."""
    (found,) = PROCESSOR.findall(results)
    return str(found)


def draw(bars: list[Bar], measured_on: str) -> str:
    """An SVG of horizontal bars with their intervals. measured_on: a processor."""
    scale = WIDTH / max(bar.high for bar in bars)
    height = TOP + STEP * len(bars) + 8
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 60} {height}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{LEFT + WIDTH + 60}" height="{height}" fill="white"/>',
        f'<text x="12" y="18" font-weight="bold">Tokens per second, greedy, two threads of an {measured_on}</text>',
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
    """Write the figure and the table; returns the exit status."""
    results = (DOCS / "results.md").read_text(encoding="utf-8")
    (DOCS / "speed.svg").write_text(draw(read_bars(results), processor(results)), encoding="utf-8")
    page = README.read_text(encoding="utf-8")
    README.write_text(OLD_TABLE.sub(lambda _: readme_table(results), page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

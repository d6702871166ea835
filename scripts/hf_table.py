"""Print how far headwise's logits lie from eager's on tiny random models of many kinds, as a Markdown table.

python scripts/hf_table.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from hf_measure import counted, decode_distance, forward_distance  # noqa: E402
from hf_models import ROWS, Row, inputs, logits  # noqa: E402


def line(row: Row) -> str:
    model = row.build()
    unpadded = forward_distance(row, model, "none").to_eager
    padded = "-"
    if row.kind != "vision":
        padded = f"{max(forward_distance(row, model, side).to_eager for side in ('left', 'right')):.1e}"
    decode = "-"
    if row.kind == "decoder":
        decode = f"{max(decode_distance(model, cache).to_eager for cache in ('dynamic', 'static')):.1e}"
    model.set_attn_implementation("headwise")
    with counted() as calls:
        size = logits(model, inputs(row)).abs().max()
    return f"| {row.name} | {len(calls)}/{row.calls} | {padded} | {unpadded:.1e} | {decode} | {size:.1f} |"


if __name__ == "__main__":
    print("| model | calls | padded | unpadded | decode (dynamic, static) | largest logit |")
    print("|---|---|---|---|---|---|")
    for row in ROWS:
        print(line(row), flush=True)

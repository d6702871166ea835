"""torch.compile and torch.export of whole models that run on headwise's attention.

In a process of its own: the run-time shape checker of the other tests is Python that no compiler can trace.
"""

from __future__ import annotations

from pathlib import Path

import fresh

SCRIPT = """
import torch
from hf_models import BY_NAME, inputs, real_rows

def both(name, run, **more):
    row = BY_NAME[name]
    model, given = row.build(), dict(inputs(row, "left"), use_cache=False, **more)
    model.set_attn_implementation("headwise")
    with torch.no_grad():
        plain = model(**given)
        out = run(model, given)
    real = real_rows(row, "left")
    assert (out.logits - plain.logits)[real].abs().max() < 1e-5 * plain.logits.abs().max(), name
    return out

def compiled(model, given):
    return torch.compile(model, fullgraph=True, backend="eager")(**given)

def exported(model, given):
    return torch.export.export(model, (), given).module()(**given)

seen = both("GPT-2", compiled, output_attentions=True)
assert [tuple(w.shape) for w in seen.attentions] == [(3, 4, 11, 11)] * 2
both("Mistral window", exported)
print("both")
"""


def test_whole_models_compile_and_export() -> None:
    root = Path(__file__).resolve().parents[2]
    done = fresh.run(SCRIPT, path=[root / "src", root / "tests"])
    assert done.stdout.strip().endswith("both"), done.stderr[-3000:]

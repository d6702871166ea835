"""torch.compile and torch.export of whole models that run on headwise's attention.

In a process of its own: the run-time shape checker of the other tests is Python that no compiler can trace.
"""

from __future__ import annotations

from pathlib import Path

import fresh
import pytest

pytestmark = pytest.mark.slow

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

GENERATE = """
import torch
import headwise.hf
from headwise.hf.models.architectures import CACHE
from hf_models import BY_NAME, token_ids

model, ids = BY_NAME["Mistral window"].build(), token_ids(11)
model.set_attn_implementation("headwise")
plain = model.forward

def generated(**more):
    return model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None, **more).tolist()

def error(**more):
    try:
        return generated(**more)
    except Exception as error:
        return str(error)

right = generated()
print("cache_implementation", generated(cache_implementation="static") == right)
print("both", error(cache_implementation="static", **{CACHE: headwise.hf.make_cache(model)}).partition("(")[0])
model.forward = torch.compile(plain, backend="eager")
print("compiled static", generated(cache_implementation="static") == right)
print("compiled make_cache", generated(**{CACHE: headwise.hf.make_cache(model)}) == right)
torch._dynamo.reset()  # the compiled code above has reached the limit of recompilations and runs eagerly
model.forward = torch.compile(plain, backend="eager", fullgraph=True)
text = error(**{CACHE: headwise.hf.make_cache(model)})
print("one graph", "it reads or changes a key-value cache, which is a Python object" in text)
"""
GENERATED = """\
cache_implementation True
both Passing both `cache_implementation`\x20
compiled static True
compiled make_cache True
one graph True
"""
ROOT = Path(__file__).resolve().parents[2]


def test_whole_models_compile_and_export() -> None:
    done = fresh.run(SCRIPT, path=[ROOT / "src", ROOT / "tests"])
    assert done.stdout.strip().endswith("both"), done.stderr[-3000:]


def test_generate_gives_the_same_tokens_compiled_and_by_any_cache() -> None:
    """With a cache of `make_cache` attention runs between the graphs, so one graph for all of it is refused by name."""
    done = fresh.run(GENERATE, path=[ROOT / "src", ROOT / "tests"])
    assert done.stdout == GENERATED, done.stdout + done.stderr[-3000:]

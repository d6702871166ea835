"""The first call of a process takes the path of every other, which its arguments alone decide.

Gradient checkpointing runs a call twice and wants the same of both, so a first call that differs ends the first
training step (`CheckpointError`). Each case here is the first call of a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import draw
import first_calls
import fresh
import pytest

from headwise.ops.native.library import error_for

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
CASES = [(way, place) for way in first_calls.WAYS for place in first_calls.PLACES]
CASES = [case for case in CASES if first_calls.fits(*case)]
CODE = "import sys; from first_calls import compare; compare(*sys.argv[1:])"
USUAL = [
    ("causal", "checkpointed"),
    ("multi-head", "checkpointed"),
    ("transformers", "checkpointed"),
    ("decode steps", "plain"),
]


def test_the_first_call_is_as_the_second() -> None:
    failed = []
    for way, place in dict.fromkeys([*USUAL, *draw.drawn(CASES)]):
        done = fresh.run(CODE, way, place, folder=HERE, path=[HERE], HEADWISE_UNCHECKED="1")
        if done.returncode:
            failed.append(f"{way}, {place}: {done.stderr.strip().splitlines()[-1]}")
    assert not failed, "\n".join(failed)


EAGER = """
import sys, torch, headwise
x = torch.randn(1, 2, 3, 4)
headwise.attention(x, x, x, mask=headwise.causal())
module = headwise.MultiHeadAttention(8, 2)
module(torch.randn(1, 3, 8), cache=headwise.cache.StaticCache(1, 2, 4, capacity=5))
headwise.attention_statistics(x, x, x)
print("torch._dynamo" in sys.modules)
torch.compile(lambda x: headwise.attention(x, x, x), backend="eager")(x)
print("torch._dynamo" in sys.modules)
"""


def test_eager_calls_import_no_compiler() -> None:
    """torch._dynamo takes a second and 70 MB. In a new interpreter; the last line shows that the test would see it."""
    done = subprocess.run([sys.executable, "-c", EAGER], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "True"], done.stderr


SAVE = """
import sys, torch, headwise
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mha = headwise.MultiHeadAttention(24, 3, num_kv_heads=1)
    def forward(self, x):
        return self.mha(x, mask=headwise.causal() & headwise.window(4))
torch.manual_seed(0)
net, x = Net().eval(), torch.randn(2, 7, 24)
for grad in (True, False):
    with torch.set_grad_enabled(grad):
        program = torch.export.export(net, (x,))
    names = [str(node.target) for node in program.graph.nodes if "headwise" in str(node.target)]
    print(*names)
    torch.export.save(program, f"{sys.argv[1]}/{grad}.pt2")
torch.save((x, net(x).detach()), f"{sys.argv[1]}/io.pt")
"""
LOAD = """
import sys
{first}
x, y = torch.load(f"{{sys.argv[1]}}/io.pt")
for grad in (True, False):
    out = torch.export.load(f"{{sys.argv[1]}}/{{grad}}.pt2").module()(x)
    print(float((out - y).abs().max()) < 1e-5)
"""


@pytest.mark.skipif(
    error_for() is not None, reason="without the native kernel a program holds operators of torch alone"
)
def test_a_saved_program_runs_where_headwise_is_imported(tmp_path: Path) -> None:
    """Whichever of headwise and torch is imported first, and on a machine that has no native library."""
    said = fresh.run(SAVE, str(tmp_path))
    assert said.stdout.split() == ["headwise.attend_train.default", "headwise.attend_full.default"], said.stderr
    assert fresh.run(LOAD.format(first="import torch"), str(tmp_path)).returncode != 0, (
        "the programs hold our operators"
    )
    for first, environment in (
        ("import torch, headwise", {}),
        ("import headwise.hf, torch", {}),
        ("import torch, headwise", {"HEADWISE_NATIVE": "0"}),
    ):
        done = fresh.run(LOAD.format(first=first), str(tmp_path), **environment)
        assert done.stdout.split() == ["True", "True"], (first, environment, done.stderr)


def test_operators_come_with_torch_whichever_is_imported_first() -> None:
    """In a new interpreter: `import headwise` imports no torch, and its operators are there once torch is."""
    code = """
import headwise, sys
print("torch" in sys.modules)
import torch
print(hasattr(torch.ops.headwise, "attend_train"), type(torch.__spec__.loader).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "SourceFileLoader"]

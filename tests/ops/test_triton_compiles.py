"""The Triton kernels compile for cards that are not here, with Triton's own assembler: what it tells of each build.

All of `shapes.json`: compute capability 8.0, 9.0, 10.0, 12.0; head dims 64, 128, 256; with and without statistics. A
build takes 2 to 9 seconds, so that `make test` compiles a share, the same on every day.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_cases import needs_triton

from headwise.ops.triton.launch import shapes

pytestmark = [
    pytest.mark.slow,
    needs_triton,
    pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler is for Linux"),
]
BUILDS = Path(__file__).parents[1] / "helpers" / "triton_builds.py"
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""The most shared memory of a block, in bytes (CUDA's tables of technical specifications)."""
ARCHITECTURES = tuple(SHARED)


def test_every_card_has_a_shape_for_every_head_dim() -> None:
    for kernel, table in shapes().items():
        dims = {"64", "128", "256", "512"} if kernel == "decode" else {"64", "128", "256"}
        assert {int(arch) for arch in table} == set(ARCHITECTURES)
        assert all(set(of_card) == dims for of_card in table.values()), kernel


@pytest.mark.sweep
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_builds(arch: int, dim: int) -> None:
    """No spill up to a head dim of 128 on Hopper, matrix instructions in every kernel, shared memory that is there."""
    kept = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, BUILDS, str(arch), str(dim)]
    ended = subprocess.run(command, env=kept, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    made = [json.loads(line) for line in ended.stdout.splitlines()]
    names = {"attend", "statistics", "decode", "decode int8 pages"} if dim <= 256 else {"decode", "decode int8 pages"}
    assert {build["kernel"] for build in made} == names
    for build in made:
        assert build["matrix"] > 0 and build["shared"] <= SHARED[arch], build
        if arch == 90 and dim <= 128:
            assert build["spills"] == 0, build
        if arch == 90 and build["kernel"] in ("attend", "statistics"):
            assert build["hopper"] > 0, build

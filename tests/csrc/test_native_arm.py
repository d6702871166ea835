"""The kernels for 64-bit Arm, cross-compiled and emulated. `make arm` builds them; without it these tests skip."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "arm"
LIBRARIES = Path("/usr/aarch64-linux-gnu")
FUZZ = BUILD / "headwise_fuzz"
OBJECTS = BUILD / "CMakeFiles" / "kernels.dir" / "csrc"
OPTIONAL = re.compile(r"\t(bfdot|bfmmla|bfcvtn?|usdot|usmmla|sdot|udot)\b")  # instructions that some Arm CPUs lack
pytestmark = pytest.mark.skipif(
    not FUZZ.exists() or not shutil.which("qemu-aarch64"), reason="needs `make arm`: a cross compiler and qemu-user"
)


def fuzzed(cpu: str, *arguments: str) -> str:
    command = ["qemu-aarch64", "-cpu", cpu, "-L", str(LIBRARIES), str(FUZZ), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("seed", [2, 4, 10, 20, 23])  # bf16, f16, f32, int8; `make arm` draws many
def test_every_set_of_instructions_agrees_with_the_definition(seed: int) -> None:
    fuzzed("max", "case", str(seed))


def test_a_cpu_with_all_of_them_runs_all() -> None:
    output = fuzzed("max", "0.1")
    assert " 0 failures" in output and all(f"  {name} " in output for name in ("neon_bf16", "neon", "baseline"))


def test_a_cpu_without_the_optional_instructions_runs_the_others() -> None:
    output = fuzzed("cortex-a72", "0.1")
    assert "neon " in output and "baseline" in output and "neon_bf16" not in output


def test_optional_instructions_stay_in_their_file() -> None:
    objdump = shutil.which("aarch64-linux-gnu-objdump")
    if objdump is None:
        pytest.skip("needs aarch64-linux-gnu-objdump")
    where = {}
    for path in OBJECTS.rglob("*.o"):
        text = subprocess.run([objdump, "-d", "--no-show-raw-insn", path], capture_output=True, text=True, check=True)
        where[path.name.removesuffix(".cpp.o")] = set(OPTIONAL.findall(text.stdout))
    assert {"bfdot", "usdot"} <= where.pop("neon_bf16")
    assert {"neon", "dispatch"} <= where.keys() and not any(where.values()), where

"""Compile the Triton kernels for cards that are not here, and print what came of each build: one JSON object a line.

A process of its own, without TRITON_INTERPRET: `python tests/helpers/triton_builds.py 90 128` builds what `shapes.json`
names for capability 9.0 and a head dim of 128. Registers, stack and spills are those of Triton's own assembler.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# fmt: off
TYPES = {
    "Q": "bf16", "K": "bf16", "V": "bf16", "Out": "bf16", "Order": "i32", "Counts": "i32", "Index": "i32",
    "Bits": "i64", "Ints": "i32", "Bad": "u8", "Any": "i32", "Low": "i64", "High": "i64", "Start": "i64",
    "Stop": "i64", "Table": "i64", "Columns": "bf16",
}
# fmt: on
"""The dtypes of pointers; others are float32."""
NUMBERS, FLOATS = {"B", "H", "G", "T", "S", "NQ", "NK", "KH", "SPLITS", "BLOCKS", "N"}, {"scale", "softcap"}
ATTEND: dict[str, Any] = {
    "MAP": False, "WHICH": 0, "STATISTICS": False, "BINS": 0, "USED": 0, "NC": 0, "DENSE": False,
    "DIAGONALS": False, "CAP": False, "SINK": False, "CAREFUL": False, "VALUES": True,
}  # fmt: skip
DECODE: dict[str, Any] = {
    "PAGED": False, "INT8": False, "SHARED": False, "WHICH": 0, "DENSE": False, "DIAGONALS": False, "CAP": False,
}  # fmt: skip
WITH_STATISTICS = {"STATISTICS": True, "BINS": 32, "USED": 32, "NC": 32}


def build(kernel: Any, forms: dict[str, Any], arch: int, warps: int, stages: int, types: dict[str, str]) -> Any:
    """Compile a kernel for a card; return what the assembler tells of it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = TYPES | types
    tensors = {n for n in names if n[0].isupper() and n not in NUMBERS and n not in forms}
    kinds = {n: "*" + types.get(n, "fp32") if n in tensors else "fp32" if n in FLOATS else "i32" for n in names}
    signature = kinds | dict.fromkeys(forms, "constexpr")
    # As at a launch: pointers, and strides of whole rows, are multiples of 16.
    aligned = [n for n in names if n in tensors or n in STRIDES]
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    constants = {(names.index(n),): x for n, x in forms.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return told(made)


STRIDES = ("s_qb", "s_qh", "s_q", "s_kb", "s_kh", "s_k", "s_vb", "s_vh", "s_v", "s_ob", "s_oh", "s_o")


def told(made: Any) -> dict[str, Any]:
    """Registers, stack, shared memory, spills and matrix instructions of a compiled kernel."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tools / "cuobjdump", flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("--dump-resource-usage", "--dump-sass")
        )
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())  # type: ignore[union-attr]
    count = {name: len(re.findall(rf"\b{name}\b", code)) for name in ("LDL", "STL", "HGMMA", "HMMA", "UTCHMMA")}
    matrix = count["HGMMA"] + count["HMMA"] + count["UTCHMMA"]
    spills = count["LDL"] + count["STL"]
    return {
        "registers": registers, "stack": stack, "shared": made.metadata.shared, "spills": spills, "matrix": matrix,
        "hopper": count["HGMMA"], "instructions": code.count(";"),
    }  # fmt: skip


def builds(arch: int, dim: int) -> list[tuple[str, Any, dict[str, Any], tuple[int, int, int], dict[str, str]]]:
    """What is built for a card and a head dim."""
    from headwise.ops.statistics.triton import ONE_PASS
    from headwise.ops.triton.kernels.attend_kernel import attend
    from headwise.ops.triton.kernels.decode_kernel import split
    from headwise.ops.triton.launch import halves, shapes

    found = []
    dims = {"DK": dim, "DV": dim, "D": dim, "VD": dim}
    if str(dim) in shapes()["attend"][str(arch)]:
        for name in ("attend", "statistics"):
            rows, warps, stages = shapes()[name][str(arch)][str(dim)]
            forms = {**ATTEND, **dims, "BM": rows} | (
                WITH_STATISTICS | {"VALUES": dim <= ONE_PASS} if name == "statistics" else {}
            )
            found.append((name, attend, forms, (rows, warps, stages), {}))
    keys, rows, warps, stages = shapes()["decode"][str(arch)][str(dim)]
    latent = dim == 512
    one, two = halves(576 if latent else dim)
    sizes = {"D1": one, "D2": two, "DV": dim, "VD": dim, "D": one + two, "BM": rows if latent else 16, "BN": keys}
    for name, more, types in (
        ("decode", {"SHARED": latent}, {}),
        ("decode int8 pages", {"SHARED": latent, "PAGED": True, "INT8": True}, {"K": "i8", "V": "i8"}),
    ):
        found.append((name, split, {**DECODE, **sizes, **more}, (keys, warps, stages), types))
    return found


def main() -> None:
    arch, dim = int(sys.argv[1]), int(sys.argv[2])
    for name, kernel, forms, (rows, warps, stages), types in builds(arch, dim):
        result = build(kernel, forms, arch, warps, stages, types)
        print(
            json.dumps({"kernel": name, "arch": arch, "dim": dim, "shape": [rows, warps, stages], **result}), flush=True
        )


if __name__ == "__main__":
    main()

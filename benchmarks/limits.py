"""The limits of this machine, measured in turns with what is compared with them: limits.cpp, compiled on the fly.

Without a C++ compiler there are no limits (`compiled()` is None), and the table leaves those columns empty.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("limits.cpp")
SECONDS = 0.03  # of one measurement: long enough to be exact to a percent, short enough to take part in every round


@cache
def compiled() -> ctypes.CDLL | None:
    """The library, or None where there is no compiler or it cannot compile this."""
    compiler = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "limits.so"
        flags = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread"]
        done = subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], capture_output=True, timeout=120)
        if done.returncode:
            return None
        lib = ctypes.CDLL(str(library))
    for name in ("fma_rate", "fma_avx2_rate", "bf16_rate"):
        getattr(lib, name).argtypes = [ctypes.c_int, ctypes.c_double]
        getattr(lib, name).restype = ctypes.c_double
    lib.read_rate.argtypes = [ctypes.c_int, ctypes.c_double, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    lib.read_rate.restype = ctypes.c_double
    return lib


@cache
def operation(dtype: str) -> str:
    """The instruction that bounds arithmetic in this dtype: bf16's own where it has the higher rate, else float32's."""
    if os.environ.get("HEADWISE_ISA") == "avx2":
        return "fma_avx2_rate"
    lib = compiled()
    pairs = dtype == "bfloat16" and lib is not None and lib.bf16_rate(1, SECONDS) > lib.fma_rate(1, SECONDS)
    return "bf16_rate" if pairs else "fma_rate"


def arithmetic(dtype: str, seconds: float = SECONDS) -> float | None:
    """Floating-point operations a second, by all of torch's threads (a multiply-add counts two)."""
    lib = compiled()
    return None if lib is None else getattr(lib, operation(dtype))(torch.get_num_threads(), seconds) or None


def reading(tensors: Sequence[Tensor], seconds: float = SECONDS) -> float | None:
    """Bytes a second read from the memory of these very tensors, over and over, by all of torch's threads."""
    lib = compiled()
    if lib is None:
        return None
    pointers = (ctypes.c_void_p * len(tensors))(*[x.data_ptr() for x in tensors])
    sizes = (ctypes.c_size_t * len(tensors))(*[x.nbytes for x in tensors])
    return lib.read_rate(torch.get_num_threads(), seconds, pointers, sizes, len(tensors))

"""The native library as built and installed: its object files, drawn cases under sanitizers, and life without it."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import draw
import fresh
import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
LIBRARY = ROOT / "src" / "headwise" / "_native.so"
COMPILER = next((path for path in map(shutil.which, ("c++", "g++", "clang++")) if path), None)

needs_compiler = pytest.mark.skipif(
    not (COMPILER and shutil.which("cmake") and CSRC.exists()), reason="needs a C++ compiler, cmake and csrc/"
)
needs_x86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="other CPUs have no files of their own yet")


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Its output in one piece; a failure shows it."""
    environment = {**os.environ, **env}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=1200, check=False)


def ok(*command: str | Path, **env: str) -> str:
    done = run(*command, **env)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def configure(folder: str, *options: str) -> Path:
    """A build folder of ours, kept from run to run: what has not changed is not compiled again."""
    build = ROOT / "build" / folder
    build.mkdir(parents=True, exist_ok=True)
    with open(ROOT / "build" / "lock", "w") as lock:  # that of hatch_build.py: another test process may build, too
        fcntl.flock(lock, fcntl.LOCK_EX)
        ok("cmake", "-S", ROOT, "-B", build, "-DHEADWISE_FUZZ=ON", *options)
        ok("cmake", "--build", build, "--target", "headwise_fuzz", "--parallel", str(os.cpu_count()))
    return build


# Object files: instructions and symbols


@pytest.fixture(scope="module")
def built() -> Path:
    """The build folder of the library, up to date."""
    ok(sys.executable, ROOT / "hatch_build.py")
    return ROOT / "build" / "native"


@pytest.fixture(scope="module")
def objects(built: Path) -> dict[str, Path]:
    """The object files of the library by their source, `isa/avx2` say."""
    if not shutil.which("objdump") or not shutil.which("nm"):
        pytest.skip("needs objdump and nm (binutils)")
    folder = built / "CMakeFiles" / "kernels.dir" / "csrc"
    objects = {path.relative_to(folder).as_posix().removesuffix(".cpp.o"): path for path in folder.rglob("*.o")}
    assert {"binding/attention", "binding/tensors", "runtime/dispatch", "isa/baseline"} <= set(objects)
    return objects


# What a file of an instruction set may not hold: by mnemonic or by register. All AVX mnemonics begin with v.
PAIRS = r"vdpbf16ps|vcvtne\w*bf16\w*"
TILES = r"tdp\w+|tile\w+|ldtilecfg"
FOREIGN = {
    "": rf"\t(v\w+|{TILES})",
    "isa/avx2": rf"(%zmm\d+|\{{%k\d\}}|\t(?:{TILES}))",
    "isa/avx512": rf"\t({PAIRS}|vpdpbusd|{TILES})",
    "isa/avx512_vnni": rf"\t({PAIRS}|{TILES})",
    "isa/avx512_bf16": rf"\t({TILES})",
}


def foreign_instructions(path: Path, name: str) -> set[str]:
    text = ok("objdump", "-d", "--no-show-raw-insn", path)
    assert text.count("\n") > 50, "objdump shows no code"
    return set(re.findall(FOREIGN[name if name in FOREIGN else ""], text))


@needs_compiler
@needs_x86
def test_no_instruction_outside_its_file(objects: dict[str, Path]) -> None:
    for name, path in objects.items():
        if name != "isa/amx_bf16":
            assert foreign_instructions(path, name) == set(), name


@needs_compiler
@needs_x86
def test_a_foreign_instruction_is_found(objects: dict[str, Path]) -> None:
    assert foreign_instructions(objects["isa/avx2"], "runtime/dispatch")
    assert foreign_instructions(objects["isa/avx512"], "isa/avx2")
    assert foreign_instructions(objects["isa/avx512_vnni"], "isa/avx512")
    assert foreign_instructions(objects["isa/avx512_bf16"], "isa/avx512_vnni")
    if "isa/amx_bf16" in objects:  # g++ 10 and clang 11 do not know it
        assert foreign_instructions(objects["isa/amx_bf16"], "isa/avx512_bf16")


@functools.cache
def weak_symbols(path: Path) -> set[str]:
    """Symbols of which the linker keeps one copy, from any file."""
    lines = ok("nm", "--defined-only", path).splitlines()
    return {line.split()[-1] for line in lines if line.split()[-2] in "WVu"} - {"DW.ref.__gxx_personality_v0"}


@needs_compiler
@needs_x86
def test_no_function_shared_with_an_instruction_set(objects: dict[str, Path]) -> None:
    """Where two files hold one inline function, the linker keeps either: with AVX-512 in it, perhaps, for all CPUs."""
    for name, path in objects.items():
        for other, other_path in objects.items():
            if name.startswith("isa/") and other != name:
                assert weak_symbols(path) & weak_symbols(other_path) == set(), (name, other)


@needs_compiler
def test_a_shared_function_is_found(tmp_path: Path) -> None:
    names = []
    for name in ("isa_x", "driver"):
        (tmp_path / f"{name}.cpp").write_text("inline int f(int x) { return x; }\nint (*keep)(int) = f;\n")
        ok(str(COMPILER), "-c", tmp_path / f"{name}.cpp", "-o", tmp_path / f"{name}.o")
        names.append(weak_symbols(tmp_path / f"{name}.o"))
    assert names[0] & names[1]


# The declarations of torch's stable ABI


def compiles_beside_torch(header: str, folder: Path) -> bool:
    (folder / "torch_abi.h").write_text(header)
    (folder / "both.cpp").write_text(
        "#define TORCH_TARGET_VERSION ((2ULL << 56) | (10ULL << 48))\n#include <torch/csrc/stable/c/shim.h>\n"
        '#include "torch_abi.h"\nstatic_assert(headwise::kTorchAbi == TORCH_TARGET_VERSION);\n'
    )
    include = Path(torch.__file__).parent / "include"
    return run(str(COMPILER), "-std=c++17", "-fsyntax-only", f"-I{include}", folder / "both.cpp").returncode == 0


@needs_compiler
def test_declarations_agree_with_torch(tmp_path: Path) -> None:
    """Two declarations of a C function that disagree do not compile; one that torch has not would not load."""
    header = (CSRC / "torch_abi" / "torch_abi.h").read_text()
    assert compiles_beside_torch(header, tmp_path)
    wrong = header.replace(
        "aoti_torch_get_dim, (AtenTensorHandle, int64_t*)", "aoti_torch_get_dim, (AtenTensorHandle, int*)"
    )
    assert wrong != header and not compiles_beside_torch(wrong, tmp_path)


# Drawn cases


def has_sanitizer(name: str, folder: Path) -> bool:
    """Whether a program under this sanitizer is compiled, and starts."""
    (folder / "empty.cpp").write_text("int main() {}\n")
    made = run(str(COMPILER), f"-fsanitize={name}", folder / "empty.cpp", "-o", folder / "empty").returncode == 0
    return made and run(folder / "empty").returncode == 0


@needs_compiler
def test_drawn_cases_under_sanitizers(tmp_path: Path) -> None:
    """The first cases of `make fuzz`: no report of AddressSanitizer or UBSan, no wrong result, no leak.

    Compiled without optimisation: in a fifth of the time, and no check is optimised away. By number and not by seconds,
    so that all runs have the same cases, of each dtype, int8, gradients, statistics, corrupted calls. `make test`
    runs a third of the numbers, on the baseline alone, for each instruction set takes half a minute to compile.
    """
    if not has_sanitizer("address,undefined", tmp_path):
        pytest.skip("this compiler has no AddressSanitizer")
    sets = "all" if draw.SHARE == 1 else "none"
    options = ("-DHEADWISE_SANITIZE=ON", "-DHEADWISE_SANITIZE_FLAGS=-O0 -g1", f"-DHEADWISE_SETS={sets}")
    fuzzer = configure("sanitized", *options, "-DHEADWISE_SANITIZERS=address,undefined") / "headwise_fuzz"
    # 27: all chunks of a head in one item, whose sums of keys end within a cache line.
    for seed in [*draw.drawn(range(1, 25), "seeds", most=3), 27]:
        ok(fuzzer, "case", str(seed), UBSAN_OPTIONS="print_stacktrace=1")


@needs_compiler
def test_threads_get_even_shares(built: Path) -> None:
    """2 to 256 threads, by the plan alone: at most 1.05 of the mean wherever there is enough work."""
    assert "256:" in ok(configure(built.name) / "headwise_fuzz", "balance")


@needs_compiler
@pytest.mark.skipif(draw.SHARE > 1, reason="compiles the kernel once more, under ThreadSanitizer: make test-all")
def test_many_threads(tmp_path: Path) -> None:
    """`make tsan` for two seconds: on 64 threads no race, and the bits of one."""
    if not has_sanitizer("thread", tmp_path):
        pytest.skip("this compiler has no ThreadSanitizer")
    fuzzer = configure("threads", "-DHEADWISE_TSAN=ON", "-DHEADWISE_SANITIZE_FLAGS=-O0 -g1") / "headwise_fuzz"
    output = ok(fuzzer, "threads", "2", "1183")  # begins with sums of a gradient that are denormal
    assert " 0 failures" in output


@needs_compiler
@needs_x86
def test_on_an_older_cpu(built: Path) -> None:
    """The library's own object files: qemu stops at an instruction that the CPU has not. Nehalem has no AVX at all."""
    if not shutil.which("qemu-x86_64"):
        pytest.skip("needs qemu-x86_64 (qemu-user)")
    output = ok("qemu-x86_64", "-cpu", "Nehalem", configure(built.name) / "headwise_fuzz", "4", "1")
    assert "baseline out" in output and "avx" not in output


# Installed


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A source tree with kernels that compile at once: enough to build wheels from."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("needs hatchling, which builds the package")
    tree = tmp_path / "sources"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("_native.so", "__pycache__"))
    for name in ("hatch_build.py", "pyproject.toml", "README.md", "LICENSE", "LICENSE-python.txt"):
        shutil.copy(ROOT / name, tree / name)
    (tree / "CMakeLists.txt").write_text((ROOT / "CMakeLists.txt").read_text().replace('"-O3"', '"-O0"'))
    shutil.copytree(CSRC, tree / "csrc", ignore=shutil.ignore_patterns("isa", "fuzz"))
    sets = ("baseline", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_bf16")
    (tree / "csrc" / "none.cpp").write_text(
        '#include "runtime/kernel_table.h"\nnamespace headwise {\nstatic Kernels none;\n'
        'static const Kernels* named() {\n  none.name = "baseline";\n  return &none;\n}\n'
        + "".join(f"const Kernels* {name}_kernels() {{ return named(); }}\n" for name in sets)
        + "}\n"
    )
    return tree


def wheel(tree: Path, **env: str) -> tuple[str, set[str], str]:
    """The wheel's name, the libraries in it, and what pip said."""
    out = tree / "wheels"
    command = ["pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "--no-cache-dir", "-w", str(out), str(tree)]
    said = ok(sys.executable, "-m", *command, **env)
    (path,) = out.glob("*.whl")
    return path.name, {name for name in zipfile.ZipFile(path).namelist() if name.endswith(".so")}, said


@pytest.fixture
def from_sdist(sources: Path, tmp_path: Path) -> Path:
    """The same as its source distribution has it, and nothing beside."""
    (sources / "src" / "headwise" / "_native.so").write_bytes(b"of another machine")
    (sources / ".gitignore").write_text((ROOT / ".gitignore").read_text())
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path), cwd=sources)
    assert done.returncode == 0, done.stderr
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (tree,) = (tmp_path / "unpacked").iterdir()
    assert not (tree / "src" / "headwise" / "_native.so").exists()
    return tree


@needs_compiler
def test_a_wheel_with_the_library(from_sdist: Path) -> None:
    """For any Python and any torch from 2.10 on: no version of either in its name, and no package of theirs linked."""
    name, libraries, _ = wheel(from_sdist)
    assert re.fullmatch(r"headwise-[\d.]+-py3-none-(linux|macosx)_\w+\.whl", name)
    assert libraries == {"headwise/_native.so"}
    library = from_sdist / "src" / "headwise" / "_native.so"
    assert "Python" not in ok("ldd", library) and "python" not in ok("ldd", library)
    with zipfile.ZipFile(from_sdist / "wheels" / name) as packed:
        inside = {path.partition(".dist-info/")[2]: path for path in packed.namelist() if ".dist-info/" in path}
        assert {"licenses/LICENSE", "licenses/LICENSE-python.txt", "sboms/headwise.cdx.json"} <= set(inside)
        for licence in ("vendor/LICENSE-d3.txt", "vendor/LICENSE-tokenizers.txt"):
            assert any(path.endswith(licence) for path in inside)
        bill = json.loads(packed.read(inside["sboms/headwise.cdx.json"]))
        for part in bill["components"]:
            for known in part.get("hashes", []):
                assert known["content"] == hashlib.sha256(packed.read(part["name"])).hexdigest()
    assert {"headwise/_native.so", "headwise/models/tiny/model.safetensors"} <= {x["name"] for x in bill["components"]}


def test_the_bill_of_materials_names_every_licence_and_package() -> None:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec and spec.loader
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    bill = build.sbom("1.2.3", library=False)
    parts = [bill["metadata"]["component"], *bill["components"]]
    licences = {entry["license"]["id"] for part in parts for entry in part["licenses"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert licences == set(project["license"].split(" AND "))
    script = (ROOT / "src/headwise/report/vendor/d3.min.js").read_text().split("\n", 1)[0]
    named = set(re.findall(r"(d3-[a-z-]+) (\d+\.\d+\.\d+)", script))
    assert named and named <= {(part["name"], part.get("version")) for part in bill["components"]}
    assert bill["dependencies"] == [{"ref": "pkg:pypi/headwise@1.2.3", "dependsOn": [p["bom-ref"] for p in parts[1:]]}]
    assert ("@huggingface/tokenizers", "0.2.0") in {(part["name"], part.get("version")) for part in bill["components"]}
    assert not {"headwise/_native.so", "esbuild", "wabt"} & {part["name"] for part in parts}, "built without; a tool"


@pytest.mark.skipif(not (shutil.which("readelf") and LIBRARY.exists()), reason="needs readelf and the library")
def test_what_the_library_links() -> None:
    """torch by the name of a library that the process has, and the runtimes of C and C++ that every machine has."""
    output = ok("readelf", "-d", LIBRARY)
    needed = {name.split(".so")[0] for name in re.findall(r"\(NEEDED\).*\[(.+)\]", output)}
    runtimes = {"libstdc++", "libm", "libgcc_s", "libc", "libpthread"}
    assert "libtorch_cpu" in needed and {x for x in needed if not x.startswith("ld-")} <= runtimes | {"libtorch_cpu"}
    assert "RPATH" not in output and "RUNPATH" not in output, "a folder of the machine that built it"


@pytest.mark.parametrize(
    "env, why",
    [
        ({"CXX": "no-such-compiler"}, "no C++ compiler"),
        ({"CXX": "false"}, "the compiler failed"),
        ({"HEADWISE_NATIVE": "0"}, ""),
    ],
)
def test_a_wheel_without_a_compiler(sources: Path, env: dict[str, str], why: str) -> None:
    """Installation goes on, in pure Python, and says so in a line."""
    if why == "the compiler failed" and not shutil.which("cmake"):
        pytest.skip("needs cmake")
    name, libraries, said = wheel(sources, **env)
    assert name.endswith("-py3-none-any.whl") and libraries == set()
    line = f"headwise without its native CPU kernel ({why}"
    assert (line in said) if why else ("without its native" not in said)


@needs_compiler
def test_a_broken_build_is_an_error_where_asked(sources: Path) -> None:
    """Where it was not asked for, installation goes on, as above."""
    command = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--no-cache-dir", "-w", str(sources), str(sources)]
    done = run(sys.executable, "-m", *command, HEADWISE_NATIVE="1", CXX="false")
    assert done.returncode != 0 and "the compiler failed" in done.stdout + done.stderr


# Without the library

WITHOUT = """
import torch, headwise
q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
told = headwise.explain(q, k, v, mask=headwise.causal())
out = headwise.attention(q, k, v, mask=headwise.causal())
expected = headwise.attention(q, k, v, mask=headwise.causal(), backend="reference")
torch.testing.assert_close(out, expected)
print(headwise.__file__, told, sep="\\n")
"""


def without(package: Path, **env: str) -> str:
    done = fresh.run(WITHOUT, path=[package], **env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_switched_off() -> None:
    output = without(ROOT / "src", HEADWISE_NATIVE="0")
    assert "not native: the native library is switched off by HEADWISE_NATIVE=0" in output


def test_not_there(tmp_path: Path) -> None:
    package = tmp_path / "headwise"
    shutil.copytree(ROOT / "src" / "headwise", package, ignore=shutil.ignore_patterns("_native.so", "__pycache__"))
    output = without(tmp_path)
    assert output.startswith(str(package)), "another headwise was tested"
    assert "not native: the native library is not there" in output


def test_not_for_this_machine(tmp_path: Path) -> None:
    package = tmp_path / "headwise"
    shutil.copytree(ROOT / "src" / "headwise", package, ignore=shutil.ignore_patterns("_native.so", "__pycache__"))
    (package / "_native.so").write_bytes(b"no library at all")
    output = without(tmp_path)
    assert "not native: the native library does not load" in output

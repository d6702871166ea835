"""The ratchets of the C++ in csrc, styled by `.clang-format`: how large a part may grow, where intrinsics stand."""

from __future__ import annotations

import re
from collections.abc import Iterator

from test_architecture import MAX_FUNCTION, P90_FUNCTION, ROOT, Tree, small_files

CPP = {p.relative_to(ROOT / "csrc").as_posix(): p.read_text("utf8") for p in (ROOT / "csrc").rglob("*.*")}
INTRINSIC = re.compile(
    r"\b(_mm\w*|__m\d\w*|asm|\w*intrin\.h|arm_neon\.h|v[a-z]\w*_(?:n_)?[sufbp]+\d+|(?:float|u?int)\d+x\d+\w*|HW_BF16)\b"
)
BODY = re.compile(r"\)( const| noexcept)*( -> [\w:<>*& ]+)? \{$")
STATEMENT = re.compile(r"\s*(if|for|while|switch|else|do|catch|\})\b|\s*\}")


def cpp_functions(source: str) -> Iterator[tuple[str, int]]:
    """The first line of every function and lambda, and how many lines it has: from there to the brace below it."""
    lines = source.splitlines()
    for last in (n for n, line in enumerate(lines) if BODY.search(line)):
        first = last
        while sum(line.count("(") - line.count(")") for line in lines[first : last + 1]) < 0:
            first -= 1
        closing = re.match(" *", lines[first]).group() + "}"  # type: ignore[union-attr]
        end = next((n for n in range(last + 1, len(lines)) if lines[n].startswith(closing)), len(lines) - 1)
        if not STATEMENT.match(lines[first]):
            yield lines[first].strip(), end - first + 1


def cpp_faults(tree: Tree) -> list[str]:
    sizes = [(path, name, n) for path, source in tree.items() for name, n in cpp_functions(source)]
    faults = [f"{path}: {name} has {n} lines, at most {MAX_FUNCTION}" for path, name, n in sizes if n > MAX_FUNCTION]
    lengths = sorted(n for _, _, n in sizes)
    neutral = [path for path in tree if not path.startswith("simd/")]
    faults += [f"{path}: {x} outside simd/" for path in neutral for x in INTRINSIC.findall(tree[path])]
    return small_files(tree) + faults + ["long functions"] * (lengths[int(0.9 * (len(lengths) - 1))] > P90_FUNCTION)


def test_the_rules_of_cpp() -> None:
    assert len(list(cpp_functions("".join(CPP.values())))) > 400 and cpp_faults(CPP) == []
    long = "int f(int x,\n      int y) {\n" + "  if (x) {\n  }\n" * 40 + "}\n"
    assert "problem.h: int f(int x, has 83 lines, at most 80" in cpp_faults({"problem.h": long})
    assert "problem.h has 401 lines, at most 400" in cpp_faults(CPP | {"problem.h": "\n" * 401})
    for name in ("_mm_pause", "vaddq_f32", "vshlq_n_s32", "float32x4_t"):
        assert f"kernels/x.h: {name} outside simd/" in cpp_faults(CPP | {"kernels/x.h": f"{name}();"})

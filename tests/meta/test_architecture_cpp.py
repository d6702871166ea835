"""The rules of the C++ in csrc, styled by `.clang-format`.

They limit the size of files, functions and folders, keep intrinsics in simd/ and statements apart, and tie names of
files to what is in them.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePosixPath

from test_architecture import MAX_FUNCTION, P90_FUNCTION, ROOT, Tree, small_files

CPP = {p.relative_to(ROOT / "csrc").as_posix(): p.read_text("utf8") for p in (ROOT / "csrc").rglob("*.*")}
INTRINSIC = re.compile(
    r"\b(_mm\w*|__m\d\w*|asm|\w*intrin\.h|arm_neon\.h|v[a-z]\w*_(?:n_)?[sufbp]+\d+|(?:float|u?int)\d+x\d+\w*|HW_BF16)\b"
)
BODY = re.compile(r"\)( const| noexcept)*( -> [\w:<>*& ]+)? \{$")
STATEMENT = re.compile(r"\s*(if|for|while|switch|else|do|catch|\})\b|\s*\}")
MAX_FOLDER = 15
# Comments, texts and preprocessor lines, in which commas and brackets have no meaning.
NOISE = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'|^[ \t]*#(?:\\\n|[^\n])*", re.S | re.M
)
# What may stand before the expression of a statement. Brackets are empty here: see `joined_statements`.
BEFORE = re.compile(
    r"\s+|(?:else|do|HW_UNROLL)\b|template <[^;{]*?>(?=\s)|(?:case [^:]+|\w+)\s*:(?!:)"
    r"|(?:if constexpr|if|for|while|switch) \(\)"
)
DECLARATION = re.compile(r"(?!return\b|throw\b|delete\b)(?:alignas\(\) )?[\w:]+(?:\s+|\s*[*&]+\s*)\w")


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


@functools.cache
def joined_statements(source: str) -> list[str]:
    """Return the statements that join expressions by the comma operator, as `a = 1, b = 2;` does.

    Commas within brackets do not count: they separate arguments, or steps of a `for`. Nor do those of declarations.
    """
    text, open_blocks, brackets, joined = NOISE.sub("", source), [""], ["{"], []
    for character in text:
        if character in "([{":
            open_blocks.append("")
            brackets.append(character)
        elif character in ")]}":
            open_blocks.pop()
            open_blocks[-1] += brackets.pop() + character  # what a bracket holds is left out
        elif character == ";" and brackets[-1] == "{":
            statement = re.split(r"\{\}(?=\s*[\w*~(+-])", open_blocks[-1])[-1]
            for _ in range(2):
                statement = re.sub(r"(?<=\w)<[^<>;]*>", "", statement)
            while before := BEFORE.match(statement):
                statement = statement[before.end() :]
            joined += [" ".join(statement.split())] * ("," in statement and not DECLARATION.match(statement))
            open_blocks[-1] = ""
        else:
            open_blocks[-1] += character
    return joined


def misnamed_files(tree: Tree) -> list[str]:
    """Return what is wrong with names and folders: too many files, a name twice, `-inl.h` on the wrong files."""
    paths = [PurePosixPath(path) for path in tree]
    folders = Counter(path.parent for path in paths)
    faults = [f"{folder}/ has {n} files, at most {MAX_FOLDER}" for folder, n in folders.items() if n > MAX_FOLDER]
    stems = Counter(path.stem for path in {path.with_suffix("") for path in paths})
    faults += [f"{stem} is the name of files in {n} folders" for stem, n in stems.items() if n > 1]
    for path in (path for path in paths if path.suffix == ".h"):
        if ("HW_ISA {" in tree[str(path)]) != path.stem.endswith("-inl"):
            faults.append(f"{path}: a header compiled once per instruction set is named *-inl.h, and no other is")
    return faults


def cpp_faults(tree: Tree) -> list[str]:
    sizes = [(path, name, n) for path, source in tree.items() for name, n in cpp_functions(source)]
    faults = [f"{path}: {name} has {n} lines, at most {MAX_FUNCTION}" for path, name, n in sizes if n > MAX_FUNCTION]
    lengths = sorted(n for _, _, n in sizes)
    neutral = [path for path in tree if not path.startswith("simd/")]
    faults += [f"{path}: {x} outside simd/" for path in neutral for x in INTRINSIC.findall(tree[path])]
    faults += [f"{path}: {x} joins statements" for path, source in tree.items() for x in joined_statements(source)]
    faults += misnamed_files(tree)
    return small_files(tree) + faults + ["long functions"] * (lengths[int(0.9 * (len(lengths) - 1))] > P90_FUNCTION)


def test_the_rules_of_cpp() -> None:
    assert len(list(cpp_functions("".join(CPP.values())))) > 400 and cpp_faults(CPP) == []
    long = "int f(int x,\n      int y) {\n" + "  if (x) {\n  }\n" * 40 + "}\n"
    assert "call.h: int f(int x, has 83 lines, at most 80" in cpp_faults({"call.h": long})
    assert "call.h has 401 lines, at most 400" in cpp_faults(CPP | {"call.h": "\n" * 401})
    for name in ("_mm_pause", "vaddq_f32", "vshlq_n_s32", "float32x4_t"):
        assert f"kernels/x.h: {name} outside simd/" in cpp_faults(CPP | {"kernels/x.h": f"{name}();"})


JOINED = """
void f(int& a, int* b) {
  a = 1, b[0] = 2;  // c, d
  if (a > 0) ++a, g<int, 2>(a, b);
  for (int i = 0; i < 2; ++i, ++a) h(i, a);
  const auto step = [&](int i) { a += i, *b -= i; };
  switch (a) {
    case 1: return step(1), void();
  }
  const int x = 1, y[2] = {1, 2};
  float *p = nullptr, *q = p;
}
struct S {
  S() : m(1), n(2) {}
  int m, n;
};
"""


def test_statements_joined_by_commas_are_found() -> None:
    assert joined_statements(JOINED) == [
        "a = 1, b[] = 2", "++a, g()", "a += i, *b -= i", "return step(), void()",
    ]  # fmt: skip
    planted = CPP | {"runtime/planted.cpp": "void f() { a = 1, b = 2; }"}
    assert cpp_faults(planted) == ["runtime/planted.cpp: a = 1, b = 2 joins statements"]


def test_misnamed_files_are_found() -> None:
    assert misnamed_files({f"runtime/{n}.cpp": "" for n in range(15)}) == []
    assert misnamed_files({f"runtime/{n}.cpp": "" for n in range(16)}) == ["runtime/ has 16 files, at most 15"]
    twice = {"binding/step.cpp": "", "binding/step.h": "", "runtime/step.cpp": ""}
    assert misnamed_files(twice) == ["step is the name of files in 2 folders"]
    per_set = {"kernels/a.h": "namespace HW_ISA {", "kernels/b-inl.h": "", "kernels/c-inl.h": "namespace HW_ISA {"}
    assert [fault.split(":")[0] for fault in misnamed_files(per_set)] == ["kernels/a.h", "kernels/b-inl.h"]

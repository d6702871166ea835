"""The ratchets: what may import what, how large a part may grow, what is exported.

Each rule is a function from a tree, `{path below src/headwise: source}`, to a list of faults. The real tree must have
none, and for each rule a planted fault must be found, so that no rule can go blind.
"""

import ast
import functools
import importlib
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from source_tree import code_lines, functions, inside, module_of, options, room_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "headwise"
Tree = dict[str, str]

TIERS = (
    {"shapes", "files"},
    {"distributed"},
    {"ops"},
    {"cache", "nn"},
    {"parallel"},
    {"look", "reshape", "hf"},
    {"report"},
    {"tour"},
    {"cli"},
    {"__main__"},
)
TIER = {room: number for number, rooms in enumerate(TIERS) for room in rooms}
ALONE = {"extras", "plan", "models"}  # import nothing of ours but files; cache and up may import them
BACKENDS = {"reference", "sdpa", "flex", "native", "blocks"}  # one file each in ops/, chosen by ops/attention.py
CONTENTS = "__init__.pyi"
MAX_FILE, MAX_FUNCTION, P90_FUNCTION, MAX_FORWARD, MAX_OPTIONS = 400, 80, 40, 40, 8
MAX_FOLDER, SOURCES = 15, {".py", ".pyi", ".js", ".css", ".j2", ".wat", ".h", ".cpp"}
PUBLIC = """
    alibi alibi_slopes attention attention_max_logits attention_statistics bias blocks cache causal causal_top_left
    dilated explain Explanation HeadStatistics keep LatentAttention lengths look Mask MultiHeadAttention nn parallel
    picked plan prefix relative report reshape RowStatistics rule segments statistics top_keys TopKeys trace weights
    window
"""
EXPORTS = PUBLIC.split()
ARCHITECTURES = """
    albert bart bert blip bloom codegen cohere dbrx deberta deepseek distilbert electra falcon gemma glm gpt-2 gpt-j
    gpt-neo gpt-neox gpt-oss granite jamba llama mistral mixtral mpt olmo pegasus phi-3 pythia qwen roberta siglip
    starcoder t5 vicuna whisper xglm
"""
NAMES = "|".join(name.replace("-", "[-_ ]?") for name in ARCHITECTURES.split())
SHORT_NAMES = "CLIP|OPT|Phi|ViT"  # only as they are written: in lower case they are words of their own
ARCHITECTURE = re.compile(rf"(?<![A-Za-z])(?:(?i:{NAMES})(?![a-z])|(?:{SHORT_NAMES})(?=[A-Z][a-z]|[^A-Za-z]|$))")


@functools.cache
def real_tree() -> Tree:
    paths = [*PACKAGE.rglob("*.py"), PACKAGE / CONTENTS]
    return {path.relative_to(PACKAGE).as_posix(): path.read_text("utf8") for path in paths}


def with_planted(path: str, source: str) -> Tree:
    return {**real_tree(), path: real_tree().get(path, "") + "\n" + source}


# --- the rules ------------------------------------------------------------------------------------------------------


def may_import(room: str, target: str) -> bool:
    if target in ("hf", "report", "tour"):  # and the user: the table of contents imports nothing before it is asked for
        return room == "cli" or (room, target) in {("", "report"), ("tour", "report")}
    if room in ("", "testing"):
        return True  # the table of contents and the oracles may import everything
    if room == "plan" and target in ("files", "extras"):
        return True
    if room in ALONE or target not in TIER.keys() | ALONE | {"__version__"}:
        return False
    return TIER[target] < TIER[room] if target in TIER else TIER[room] >= TIER["cache"]


def arrows(tree: Tree) -> list[str]:
    """The order of TIERS: a room imports those before it, and no other room of its own tier."""
    return [
        f"{path} imports {name}: {room or 'the top'} may not import {room_of(name) or 'the top'}"
        for path, source in tree.items()
        for room in [room_of(module_of(path))]
        for name in sorted(inside(path, source))
        if room_of(name) != room and not may_import(room, room_of(name))
    ]


def backend_of(module: str) -> str | None:
    """The backend that a module is, or is part of; None for the rest."""
    inner = module.removeprefix("headwise.ops.").removeprefix("backends.").split(".")[0]
    return inner if module.startswith("headwise.ops.") and inner in BACKENDS else None


def backends_apart(tree: Tree) -> list[str]:
    """A backend imports no other backend; the chooser, the oracles and a gradient's gradient import the reference."""
    may_see_the_reference = (
        "ops/attention.py",
        "ops/native/gradient.py",
        "ops/__init__.py",
        "testing.py",
        "__init__.py",
    )
    faults = []
    for path, source in tree.items():
        me = backend_of(module_of(path))
        targets = {backend_of(name) for name in inside(path, source)} - {None}
        if path in may_see_the_reference:
            targets -= {"reference"}
        if me is not None:
            faults += [f"{path}: backend imports backend {other}" for other in sorted(targets - {me})]
        elif "reference" in targets:
            faults.append(f"{path} imports the reference: it is the oracle, not a part")
    return faults


def rooms_known(tree: Tree) -> list[str]:
    """A new room is a decision: it is named here, with its place in the order."""
    known = {room for rooms in TIERS for room in rooms} | ALONE | {"testing", ""}
    return [
        f"{path}: room {room_of(module_of(path))!r} has no tier"
        for path in tree
        if room_of(module_of(path)) not in known
    ]


def small_files(tree: Tree) -> list[str]:
    sizes = {path: len(source.splitlines()) for path, source in tree.items()}
    return [f"{path} has {size} lines, at most {MAX_FILE}" for path, size in sizes.items() if size > MAX_FILE]


def small_functions(tree: Tree) -> list[str]:
    sizes = [(path, name, code_lines(node)) for path, source in tree.items() for name, node in functions(source)]
    faults = [f"{path}: {name} has {n} lines, at most {MAX_FUNCTION}" for path, name, n in sizes if n > MAX_FUNCTION]
    lengths = sorted(n for _, _, n in sizes)
    p90 = lengths[int(0.9 * (len(lengths) - 1))] if lengths else 0
    return faults + [f"nine functions of ten must have at most {P90_FUNCTION} lines, not {p90}"] * (p90 > P90_FUNCTION)


def small_forwards(tree: Tree) -> list[str]:
    sizes = [(path, name, code_lines(node)) for path, source in tree.items() for name, node in functions(source)]
    return [
        f"{path}: {name} has {n} lines, at most {MAX_FORWARD}"
        for path, name, n in sizes
        if name.split(".")[-1] == "forward" and n > MAX_FORWARD
    ]


def few_options(tree: Tree) -> list[str]:
    """Public: no part of the path or the qualified name starts with one underscore; `__init__` is public."""
    private = re.compile(r"(^|[./])_(?!_)")
    return [
        f"{path}: {name} has {options(node)} options, at most {MAX_OPTIONS}"
        for path, source in tree.items()
        for name, node in functions(source)
        if not private.search(path) and not private.search(name) and options(node) > MAX_OPTIONS
    ]


def no_architecture_names(tree: Tree) -> list[str]:
    """Differences between models are data in hf/, and nowhere else is a model known by name."""
    faults = []
    for path, source in tree.items():
        for number, line in enumerate(source.splitlines(), 1):
            match = ARCHITECTURE.search(line)
            if match and not path.startswith("hf/"):
                faults.append(f"{path}:{number} names {match.group()!r}")
    return faults


def circles(tree: Tree) -> list[str]:
    """No file needs itself through others: imports inside functions and those for types alone count, too."""
    files = {module_of(path): path for path in tree if path.endswith(".py") and "/" in path}

    def file_of(name: str) -> str | None:
        while name and name not in files:
            name = name.rpartition(".")[0]
        return name or None

    needs = {
        name: {file_of(target) for target in inside(path, tree[path])} - {name, None} for name, path in files.items()
    }
    while leaves := [name for name, targets in needs.items() if not targets]:
        needs = {name: targets - set(leaves) for name, targets in needs.items() if name not in leaves}
    # What is left lies on a circle or needs one: those that nobody left needs are taken off, again and again.
    while tops := needs.keys() - set().union(*needs.values()):
        needs = {name: targets for name, targets in needs.items() if name not in tops}
    return [f"{files[name]} lies on a circle with {', '.join(sorted(map(str, needs[name])))}" for name in sorted(needs)]


def base_names_once(tree: Tree) -> list[str]:
    """A file's name says within its room which file is meant."""
    known: dict[tuple[str, str], list[str]] = {}
    for path in tree:
        if Path(path).stem != "__init__" and "/" in path:
            known.setdefault((Path(path).parts[0], Path(path).name), []).append(path)
    return [f"{' and '.join(sorted(paths))} have one name" for paths in known.values() if len(paths) > 1]


def wide_folders(paths: Iterable[str]) -> list[str]:
    """Folders with more source files than a reader takes in at a glance."""
    counts = Counter(Path(path).parent.as_posix() for path in paths if Path(path).suffix in SOURCES)
    return [f"{folder} has {n} files, at most {MAX_FOLDER}" for folder, n in sorted(counts.items()) if n > MAX_FOLDER]


def exports(tree: Tree) -> list[str]:
    """`__init__.pyi` is the table of contents: a docstring, re-exports `from .room import x as x`, the version."""
    faults = []
    names: list[str] = []
    for node in ast.parse(tree[CONTENTS]).body:
        if isinstance(node, ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
            faults += [f"{a.name} is imported without `as {a.name}`" for a in node.names if a.asname != a.name]
        elif not ast.unparse(node).startswith(("__version__: str", "'", '"')):
            faults.append(f"the table of contents holds {ast.unparse(node).splitlines()[0]!r}")
    faults += [f"{name} is exported twice" for name in sorted({name for name in names if names.count(name) > 1})]
    return faults + [f"{name} is not in the list of exports" for name in sorted(set(names) - set(EXPORTS))]


LONG = "def long():\n" + "    x = 0\n" * MAX_FUNCTION
NINE = ", ".join(f"a{i}=0" for i in range(9))
PLANTED: dict[Callable[[Tree], list[str]], list[tuple[str, str, str]]] = {
    arrows: [
        ("ops/masks/mask.py", "from headwise import nn", "ops may not import nn"),
        ("ops/masks/mask.py", "from ...nn import probe", "ops may not import nn"),
        ("ops/masks/mask.py", "def f():\n    import headwise.cli", "ops may not import cli"),
        ("shapes.py", "from .ops import masks", "shapes may not import ops"),
        ("nn/planted.py", "import headwise.cache", "nn may not import cache"),
        ("look/planted.py", "import headwise.hf", "look may not import hf"),
        ("report/planted.py", "from headwise.hf import load", "report may not import hf"),
        (CONTENTS, "from . import hf", "the top may not import hf"),
        ("look/planted.py", "from .. import report", "look may not import report"),
        ("plan/planted.py", "from headwise import shapes", "plan may not import shapes"),
        ("files/planted.py", "from .. import shapes", "files may not import shapes"),
        ("distributed/planted.py", "from ..ops import masks", "distributed may not import ops"),
        ("models/planted.py", "from ..plan import kv_bytes_per_token", "models may not import plan"),
        ("ops/planted.py", "import headwise.plan", "ops may not import plan"),
        ("nn/planted.py", "from headwise import attention", "nn may not import attention"),
        ("nn/planted.py", "import headwise", "nn may not import the top"),
        ("nn/planted.py", "import headwise.testing", "nn may not import testing"),
    ],
    backends_apart: [
        ("ops/backends/sdpa.py", "from ..reference import reference", "backend imports backend reference"),
        ("ops/flex.py", "from headwise.ops.backends import sdpa", "backend imports backend sdpa"),
        ("nn/planted.py", "from headwise.ops.reference import reference", "nn/planted.py imports the reference"),
    ],
    rooms_known: [("utils/things.py", "", "room 'utils' has no tier")],
    small_files: [("shapes.py", "\n" * MAX_FILE, "shapes.py has")],
    small_functions: [
        ("shapes.py", LONG, "shapes.py: long has 81 lines"),
        ("shapes.py", "class A:\n" + re.sub("^", "    ", LONG, flags=re.M), "shapes.py: A.long has 81 lines"),
        ("shapes.py", LONG.replace("x = 0", "pass", 1).replace("    x = 0\n", "", 30) * 500, "nine functions of ten"),
    ],
    small_forwards: [("nn/planted.py", "class A:\n  def forward(self):\n" + "    x = 0\n" * 40, "A.forward has 41")],
    few_options: [
        ("nn/planted.py", f"def f(x, *, {NINE}): ...", "f has 9 options"),
        (
            "nn/planted.py",
            f"class A:\n    def __init__(self, {', '.join(f'a{i}=0' for i in range(9))}): ...",
            "has 9 options",
        ),
    ],
    no_architecture_names: [
        ("nn/planted.py", "# as Llama does", "nn/planted.py:2 names 'Llama'"),
        ("ops/planted.py", "x = 'gpt2'", "names 'gpt2'"),
        ("look/planted.py", "if isinstance(model, OPTModel): ...", "names 'OPT'"),
        ("look/planted.py", "MixtralAttention = None", "names 'Mixtral'"),
    ],
    circles: [
        ("ops/masks/rules.py", "from .mask import Mask", "ops/masks/rules.py lies on a circle"),
        ("ops/options.py", "def f():\n    from .attention import attention", "ops/options.py lies on a circle"),
    ],
    base_names_once: [("ops/planted/mask.py", "", "ops/masks/mask.py and ops/planted/mask.py have one name")],
    exports: [
        (CONTENTS, "from .shapes import Planted as Planted", "Planted is not in the list of exports"),
        (CONTENTS, "from .ops.masks import causal", "causal is imported without `as causal`"),
        (CONTENTS, "from .ops.masks import causal as causal", "causal is exported twice"),
        (CONTENTS, "def planted(): ...", "the table of contents holds 'def planted():'"),
    ],
}


@pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Callable[[Tree], list[str]]) -> None:
    assert rule(real_tree()) == []


@pytest.mark.parametrize(
    ("rule", "path", "source", "fault"),
    [(rule, *planted) for rule, plants in PLANTED.items() for planted in plants],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_rule_finds_a_planted_fault(rule: Callable[[Tree], list[str]], path: str, source: str, fault: str) -> None:
    faults = rule(with_planted(path, source))
    assert any(fault in line for line in faults), f"planted {source[:60]!r} in {path}; found only {faults}"


def test_no_folder_holds_more_than_a_reader_takes_in() -> None:
    paths = [p.relative_to(ROOT).as_posix() for room in ("src", "csrc") for p in (ROOT / room).rglob("*")]
    assert wide_folders(paths) == []
    planted = [f"src/planted/{n}.py" for n in range(MAX_FOLDER)]
    assert wide_folders(planted) == []
    assert wide_folders([*planted, "src/planted/one_more.js"]) == ["src/planted has 16 files, at most 15"]


def test_what_is_allowed_is_not_a_fault() -> None:
    allowed = {
        "nn/a.py": "import headwise.ops.masks\nfrom .. import shapes\nfrom headwise.plan import kv_bytes_per_token",
        "cli.py": "from headwise import __version__, hf, look, models, plan, report",
        "ops/attention.py": "from . import flex, reference, sdpa",
        "ops/weights.py": f"def _f({NINE}): ...\n# clip, OPTIONS, EMPTY, vital, alberta",
    }
    for rule in (arrows, backends_apart, rooms_known, few_options, no_architecture_names):
        assert rule(allowed) == []


def test_files_outside_the_package_are_small_too() -> None:
    rooms = ("tests", "examples", "benchmarks", "scripts")
    tree = {p.relative_to(ROOT).as_posix(): p.read_text("utf8") for room in rooms for p in (ROOT / room).rglob("*.py")}
    assert "tests/meta/test_architecture.py" in tree
    assert small_files(tree) + small_functions(tree) == []


def test_every_module_can_be_imported() -> None:
    for path in sorted(set(real_tree()) - {CONTENTS}):
        importlib.import_module(module_of(path))


def test_the_exports_are_these() -> None:
    import headwise

    assert sorted(headwise.__all__, key=str.lower) == EXPORTS
    assert all(hasattr(headwise, name) for name in EXPORTS)
    assert set(EXPORTS) <= set(dir(headwise))


def test_the_version_is_one() -> None:
    import headwise

    assert headwise.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]["version"]

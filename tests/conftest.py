"""What every test runs under: shapes checked at run time, a fixed seed, no network.

The shape checker. jaxtyping's import hook rewrites the functions of `headwise` as they are imported, so that
beartype holds each public annotation (`query: Float[Tensor, "B H T D"]`) against what is passed and returned.
Users never pay for it: the hook exists only here. Two kinds of test want it off, and say so with a marker:

    @pytest.mark.unchecked          # one test, or pytestmark = pytest.mark.unchecked for a file

- tests of `torch.compile(fullgraph=True)`: the checker's wrapper is Python that the compiler cannot trace;
- tests of our own error texts: the checker would raise its own error before ours is reached.

Off means off at call time; the import stays as it is. Doctests show what a user sees, so they run unchecked too.
The checker takes a quarter of a test's time: where HEADWISE_DRAW=16, one test in 16 runs under it, and each that is
marked `checked`.
`HEADWISE_UNCHECKED=1 pytest ...` leaves the hook out altogether.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import signal
import sys
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the network is a defect
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads and subprocess tests do not mix

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's, in which Triton's interpreter computes small tiles
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait would take the other test process's core
os.environ.pop("COLUMNS", None)  # xdist sets it; commands then print as wide as in a pipe of a user

import dirty_memory
import draw
import pytest
import torch

if not torch.cuda.is_available():  # before triton is imported: without a card its kernels run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell without job control starts background jobs deaf to Ctrl-C, and so would be what tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests make much that lives for a moment: Python's own threshold, 700 objects, took a tenth of their time.
gc.set_threshold(100_000, 10, 10)

# Without beartype the tests run unchecked: on a machine with a GPU often little more than torch is installed.
CHECKED = os.environ.get("HEADWISE_UNCHECKED", "") in ("", "0") and importlib.util.find_spec("beartype") is not None

if CHECKED:
    import checker

    early = sorted(name for name in sys.modules if name.split(".")[0] == "headwise")
    if early:
        raise RuntimeError(f"the shape checker came too late: {', '.join(early)} was imported before tests/conftest.py")
    src = Path(__file__).parents[1] / "src"
    names = [".".join(path.relative_to(src).with_suffix("").parts) for path in src.glob("headwise/**/*.py")]
    # FlexAttention traces the functions it is given, even uncompiled, and Triton compiles its kernels from their text:
    # the checker's wrappers would stop both. The checker's own imports call the finder of `after_import`. A package
    # hooks all below it.
    left = ("headwise.ops.backends.flex", "headwise.ops.triton.kernels", "headwise.ops.native.after_import")
    hooked = [name.removesuffix(".__init__") for name in names if not name.startswith(left)]
    rooms = ("backends", "native", "triton")
    packages = ("headwise", "headwise.ops", *(f"headwise.ops.{room}" for room in rooms))
    hooked = [name for name in hooked if name not in packages]
    checker.install(hooked)
    checker.switch(False)  # until a test asks for it: see `shape_checker`


@pytest.fixture(autouse=True)
def shape_checker(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Switch the shape checker on for this test, if it is drawn and not marked `unchecked`; the value tells which."""
    marked, name = request.node.get_closest_marker, request.node.nodeid
    on = CHECKED and not marked("unchecked") and bool(marked("checked") or zlib.crc32(name.encode()) % draw.SHARE == 0)
    if on:
        checker.switch(True)
    yield on
    if on:
        checker.switch(False)


# `torch.manual_seed` also writes down the call stack for each kind of device that is not there: half a millisecond.
seed_all = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from the same random state, whatever ran before it and in whichever process."""
    seed_all(20)


@pytest.fixture(autouse=True, scope="session")
def memory_of_caches() -> None:
    """No cache gets memory of zeros by luck."""
    dirty_memory.install()


@pytest.fixture
def collected(request: pytest.FixtureRequest) -> frozenset[str]:
    """The ids of all tests that pytest saw in this run, those included that it does not run."""
    return request.config.stash[COLLECTED]


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A whole checkpoint of a small decoder, with its tokenizer, as transformers writes it."""
    from hf_folders import written  # with transformers: for those who ask
    from hf_models import BY_NAME

    return written(BY_NAME["Llama GQA"], tmp_path / "model")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[Any], list[Any]]:
    """No doctests in this folder: to look for them, pytest would import each helper a second time, by another name."""
    return [file for file in (yield) if type(file) is pytest.Module]


def pytest_report_header() -> str | None:
    return None if draw.SHARE == 1 else f"sweeps: one case in {draw.SHARE} (HEADWISE_DRAW); all cases: make test-all"


COLLECTED = pytest.StashKey[frozenset[str]]()  # the ids of all tests that pytest saw, before any is left out


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not drawn of the tests marked `sweep`: see `draw.py`."""
    config.stash[COLLECTED] = frozenset(item.nodeid for item in items)
    items[:], left_out = draw.split(items)
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """What is there now stays: twenty thousand tests, torch, transformers. No garbage collection looks at it again."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let pytest's last garbage collections, five of them, look at nothing but what is new since.

    Python's own at the end looks at all again: triton's library lists what is left as leaks.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)

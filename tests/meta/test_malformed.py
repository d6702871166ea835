"""Malformed calls of everything that is public: a result where they can mean something, else our own words.

Each argument of each public function is replaced in turn by a thing of the wrong kind: 34,000 calls, a minute. `make
test` draws some thousands of them.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from draw import SHARE
from malformed import SERVES, fault_of, may_serve, replacements
from malformed_calls import ROOMS, B, D, H, K, S, T, V, filled, mha, normal
from torch import Tensor

import headwise
from headwise import cache, look, nn, plan, report, reshape, testing
from headwise.ops import masks
from headwise.ops.storage.paged import Paged

pytestmark = [
    pytest.mark.unchecked,  # the shape checker would speak before we do
    pytest.mark.filterwarnings("ignore::UserWarning"),  # torch's, of tensors that it can compute with all the same
]

DRAWS = {"ops": 2500, "cache": 1500, "nn": 1600, "look": 400, "plan": 400, "testing": 700, "report": 60, "reshape": 200}

# What also serves: "target: argument" -> names of replacements.
POSITIONS = {"-1", "0", "3", "np.int64", "[[1]]", "slice", "tensor 2"}
ALSO: dict[str, set[str]] = {
    **{f"{name}: {axis}": POSITIONS for name in ("weights", "top_keys") for axis in ("rows", "heads")},
    **{f"attention int8: {name}": {"int8 keys"} for name in ("key", "value")},
    **{
        f"{name}: offset": {"-1", "0", "3", "tensor 2", "tensor [1, 2]"}
        for name in ("causal", "window", "alibi", "dilated", "blocks", "relative", "Mask.placed")
    },
    "prefix: n": {"tensor 2", "tensor [1, 2]"},
    **{
        f"Mask.{name}: {axis}": {"slice", "tensor [1, 2]"} for name in ("allowed", "added") for axis in ("rows", "cols")
    },
    **{f"{name}.truncate: lengths": {"0", "3"} for name in ("KVCache", "StaticCache", "PagedCache", "RollingCache")},
    **{
        f"{name}.{method}: indices": {"[]", "[1, 2]", "()", "range", "generator", "tensor [1, 2]", "-1"}
        for name in ("KVCache", "StaticCache", "PagedCache")
        for method in ("keep", "drop")
    },
    "MultiHeadAttention.forward: cache": {"cache"},
    "statistics: offsets": {"np.int64", "tensor 2", "[1, 2]", "range", "generator", "tensor [1, 2]", "[]", "()"},
    "attention_statistics: offsets": {
        "np.int64",
        "tensor 2",
        "[1, 2]",
        "range",
        "generator",
        "tensor [1, 2]",
        "[]",
        "()",
    },
    "Rotary: frequencies": {"[0.9, 1.9]", "tensor [1.0, 2.0]"},
    "look.at: delimiters": {"{1}"},
    "walk: query": {"-1"},
    "look.at: ids": {"[1, 2]", "tensor [1, 2]", "[[1]]", "range", "array", "list"},
    "Watch: delimiters": {"{1}"},
    "Watch: ids": {"[1, 2]", "[[1]]", "range", "array", "list"},
    **{f"{name}: ids": {"[[1]]"} for name in ("importance", "ablate", "attribute")},
    "over: texts": {"[[1]]"},
    "over: state": {"text"},
    "Vocabulary.of: names": {"['a']"},
    **{f"Vocabulary.of: {name}": {"{1}"} for name in ("delimiters", "special")},
    **{
        f"Watch.{name}: loss": {"nan", "inf", "np.float32 nan", "tensor 2", "tensor 2.0"}
        for name in ("step", "measure")
    },  # then it is left out
    **{f"{name}: heads": {"[]", "()", "{}"} for name in ("plan_prune", "prune")},
    "Repeats: seed": {"-1", "2**63"},
    "make_qkv: seed": {"-1"},
    "aligned: offsets": {"[]", "()", "range"},
    "targets: ids": {"[]", "[1, 2]", "()", "range", "generator", "array", "list"},
    "Constructed.targets: ids": {"[]", "[1, 2]", "()", "range", "generator", "array", "list"},
    "plan.of: context": {"3", "{1}"},
    **{f"plan.of: {name}": {"1.5", "2.0", "3", "2**63"} for name in ("bandwidth", "flops")},
    "parameter_counts: memory_dim": {"3"},
    "kv_bytes_per_token: bytes_per_number": {"1.5", "2.0"},
    "put: content": {"bytes"},
    "strided: slack": {"nan", "inf"},
    "poison: what": {"nan", "inf"},
}
MASKS = {"mask"}  # wherever a tensor stands for a mask


def drawn(room: str) -> list[tuple[str, str, str]]:
    """(target, argument, replacement): a part of what there is, every argument of every target among it."""
    every: list[tuple[str, str, str]] = []
    first: list[tuple[str, str, str]] = []
    draw = random.Random(room)
    for target, make in ROOMS[room].items():
        for argument, good in make()[1].items():
            named = [(target, argument, name) for name in replacements(good)]
            first.append(named.pop(draw.randrange(len(named))))
            every += named
    if SHARE == 1:
        return first + every
    return first + draw.sample(every, DRAWS[room] - len(first))


def outcome(target: str, argument: str, name: str) -> str | None:
    """What is wrong with the answer to one malformed call; None where it is as it should be."""
    room = next(room for room, targets in ROOMS.items() if target in targets)
    function, arguments = ROOMS[room][target]()
    good = arguments[argument]
    try:
        bad = replacements(good)[name]()
    except Exception:
        return None  # torch makes no such tensor of this one
    try:
        function(**{**arguments, argument: bad})
    except AssertionError as error:
        return None if target.startswith("assert_") else fault_of(error)
    except OSError as error:
        return None if room in ("look", "report", "reshape") else fault_of(error)  # a path, in our words
    except IndexError as error:
        return None if target == "Look.head" else fault_of(error)
    except Exception as error:
        return fault_of(error)
    also = ALSO.get(f"{target.split()[0]}: {argument}", set()) | ALSO.get(f"{target}: {argument}", set())
    return None if may_serve(name, good, also | (MASKS if argument == "mask" else set())) else "was taken"


@pytest.mark.parametrize("room", ROOMS)
def test_every_malformed_call_is_answered_in_our_words(
    room: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # what is written goes there
    cases = drawn(room)
    faults = {" / ".join(case): fault for case in cases if (fault := outcome(*case)) is not None}
    assert not faults, f"{len(faults)} of {len(cases)}: {dict(list(faults.items())[:9])}"


@pytest.mark.parametrize("room", ROOMS)
def test_the_calls_are_good_before_they_are_spoilt(room: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for target, make in ROOMS[room].items():
        function, arguments = make()
        if not target.startswith("assert_"):
            function(**arguments)


def test_enough_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # to make a call may write a file
    assert sum(len(drawn(room)) for room in ROOMS) >= 7000


def test_places_of_small_types_are_places() -> None:
    """torch takes uint8 for a mask where it indexes, and adds int8 up to 127 only."""
    seen = torch.rand(T, 140) > 0.5
    mask = headwise.keep(seen) & headwise.window(130) & headwise.bias(normal(T, 140))
    rows, cols = torch.tensor([0, 2, 1]), torch.tensor([1, 0, 126, 3])
    for small in (torch.int8, torch.uint8, torch.int32):
        for ask in (mask.allowed, mask.added):
            answer = ask(T, 140, rows=rows.to(small), cols=cols.to(small))
            assert torch.equal(answer, ask(T, 140, rows=rows, cols=cols))  # type: ignore[arg-type]
        for ours, exact in zip(
            mask.at(rows[:, None].to(small), cols.to(small), T, 140), mask.at(rows[:, None], cols, T, 140), strict=True
        ):
            assert torch.equal(ours, exact)  # type: ignore[arg-type]


# -- nothing public is forgotten ---------------------------------------------------------------------------------------

# Records, which the library fills: plain dataclasses. Bases and protocols: for those who derive from them.
RECORDED = """
    Explanation HeadStatistics RowStatistics TopKeys AttentionCall Stage Trace Probe QuantizationError HeadRecord Look
    Score Evidence Passage Role AttentionPlan AttentionShape ContextCost Accuracy Mask Head Quantized KVCache Inner
    LatentCache Comparison HeadChange Curve Point Ablation Circuits Composition HeadImportance HeadWrites Importance
    Redundancy SimilarHead LossCurve Vocabulary Pruning Regrouping Reconstruction Processes
    Projections ModelOverRanks Attribution HeadLogit HeadNorms HeadPatch LogitDifference NormWeighted Patching Walk
"""
RECORDS = RECORDED.split()
# Handed on: by whom, and so checked where.
HANDED_ON = {
    "unwrap": "anything is its own inside",
    "Probe.record": "by what watches a model",
    "LogitDifference.__call__": "by look.patch, on the output of its model",
    "Role.plays": "numbers of a measurement",
    "HeadRecord.check": "by HeadRecord.from_dict",
    "Look.plot_head": "by Look.head",
    "Point.of": "by Watch.step",
    "Point.best": "by Curve.best",
    "Point.check": "by Curve.from_dict",
    "Point.from_dict": "by Curve.from_dict",
    "KVCache.check_query": "by KVCache.attend",
    "KVCache.rules": "by KVCache.attend",
    "KVCache.set_lengths": "by KVCache.truncate",
    "KVCache.set_rows": "by KVCache.reorder",
    "KVCache.step": "by modules, after their projections",
    "KVCache.positions": "by modules, of tokens that they checked",
    "KVCache.takes_steps": "by modules, after their projections",
    "Rotary.turn": "by modules, for a step of a cache",
    "Proof.request": "by what writes a checkpoint",
    **{f"Processes.{name}": "by distill" for name in ("share", "add", "add_gradients")},
    **{f"Processes.{name}": "by look.over" for name in ("of", "together", "exchange")},
}


def public(module: ModuleType, names: list[str]) -> Iterator[str]:
    """`function`, `Class` and `Class.method` of what takes an argument."""
    for name in names:
        value = getattr(module, name)
        if inspect.isclass(value):
            yield name
            for method, plain in vars(value).items():
                function = plain.__func__ if isinstance(plain, (staticmethod, classmethod)) else plain
                if inspect.isfunction(function) and (not method.startswith("_") or method in ("__and__", "__or__")):
                    taken = list(inspect.signature(getattr(value, method)).parameters)
                    if [parameter for parameter in taken if parameter != "self"]:
                        yield f"{name}.{method}"
        elif inspect.isfunction(value) and inspect.signature(value).parameters:
            yield name


def test_nothing_public_is_forgotten() -> None:
    own = [name for name, x in vars(masks).items() if inspect.isfunction(x) or name == "Mask"]
    rooms: list[tuple[ModuleType, list[str]]] = [
        (headwise, [name for name in headwise.__all__ if not inspect.ismodule(getattr(headwise, name))]),
        *((room, list(room.__all__)) for room in (cache, nn, look, plan, reshape, testing, report)),
        (masks, own),
    ]
    covered = {target.split()[0] for room in ROOMS.values() for target in room} | set(HANDED_ON)
    covered |= {"at", "of"} & {name.split(".")[-1] for name in covered}  # look.at, plan.of
    missing = [
        name
        for module, names in rooms
        for name in public(module, names)
        if name not in covered and name not in RECORDS and name.split(".")[0] != "LatentCache"
    ]
    assert not missing


def test_the_judge_can_fail() -> None:
    def ours() -> None:
        headwise.window(0)

    def theirs() -> None:
        torch.zeros(2).view(3)

    def torchs_value_error() -> None:
        torch.distributions.Normal(torch.zeros(1), -torch.ones(1), validate_args=True)  # tracing switches it off

    for call, text in ((ours, None), (theirs, "RuntimeError"), (torchs_value_error, "in the words of another")):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        fault = fault_of(caught.value)
        assert fault is None if text is None else text in (fault or "")
    assert may_serve("3", 5, set()) and not may_serve("True", 5, set()) and may_serve("True", True, set())
    assert set(SERVES) >= {bool, int, float, str, list, Tensor}


# -- the cases that were found, by their text --------------------------------------------------------------------------

Q, KEY, VALUE = normal(B, H, T, D), normal(B, K, S, D), normal(B, K, S, V)
X = normal(B, T, 12)
PAGES, TABLE = Paged(normal(4, K, 128, D), torch.tensor([[0, 1], [2, 4]]), 130), torch.tensor([[0, 1], [2, 4]])


def freed(x: Tensor, part: float = 0.0) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(int(x.untyped_storage().nbytes() * part))
    return x


def pages(table: Any, length: Any = 130, size: int = 128) -> Tensor:
    key, value = (Paged(normal(4, K, size, n), table, length) for n in (D, V))
    return headwise.attention(Q, key, value)


def stepped(**changed: Any) -> Any:
    return mha(head_dim=D, value_dim=V)(X, **{"cache": filled("static"), **changed})


DENSE = "is a dense tensor; got a"
KNOWN: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a huge scale": (lambda: headwise.attention(Q, KEY, VALUE, scale=10**400), ValueError, "scale is a finite factor"),
    "a huge softcap": (lambda: headwise.attention(Q, KEY, VALUE, softcap=10**400), ValueError, "softcap bounds scores"),
    "True for a scale": (lambda: headwise.attention(Q, KEY, VALUE, scale=True), TypeError, "scale is a number or None"),
    "a sparse query": (
        lambda: headwise.attention(Q.to_sparse(), KEY, VALUE),
        ValueError,
        f"query {DENSE} sparse_coo one; make it dense with .to_dense()",
    ),
    "keys of mkldnn": (
        lambda: headwise.attention(Q, KEY.to_mkldnn(), VALUE), ValueError, f"key {DENSE} mkldnn one; make it dense"
    ),
    "a ragged query": (
        lambda: headwise.attention(torch.nested.nested_tensor([Q[0]], layout=torch.jagged), KEY, VALUE),
        ValueError,
        f"query {DENSE} ragged one; make it dense with torch.nested.to_padded_tensor, and a mask for the padding",
    ),
    "freed keys": (
        lambda: headwise.attention(Q, freed(KEY), VALUE),
        ValueError,
        "the numbers of key are not in memory: float32 (2, 3, 7, 11) on cpu needs 1848 bytes, and its storage has 0; "
        "was it freed (resize_) while in use?",
    ),
    "half of the values": (
        lambda: headwise.attention(Q, KEY, freed(VALUE, 0.5)), ValueError, "needs 2184 bytes, and its storage has 1092"
    ),
    "a freed mask": (
        lambda: headwise.attention(Q, KEY, VALUE, mask=freed(normal(T, S))), ValueError, "the tensor of bias() are"
    ),
    "a page that is not there": (
        lambda: pages(torch.tensor([[0, 1], [2, 4]])), ValueError, "a table names pages 0 to P - 1 = 3; got 0 to 4"
    ),
    "a page before the first": (lambda: pages(torch.tensor([[0, 1], [2, -1]])), ValueError, "got -1 to 2"),
    "too few pages": (
        lambda: pages(torch.tensor([[0], [1]])), ValueError, "N * size >= length; got pages float32 (4, 3, 128, 11)"
    ),
    "a table of floats": (lambda: pages(TABLE.float()), TypeError, "table is of the key in pages: pages (P, K, "),
    "a short page": (lambda: pages(TABLE.clamp(max=3), size=100), ValueError, "size a multiple of 128"),
    "half an offset": (lambda: headwise.statistics(Q, KEY, offsets=1.5), TypeError, "such as range(-3, 4); got 1.5"),
    "half a bin": (lambda: headwise.statistics(Q, KEY, pool=2.5), TypeError, "pool is an int; got 2.5"),
    "slopes of a list": (
        lambda: headwise.alibi([0.5]), TypeError, "slopes of alibi() is a float tensor (H,) or (B, H); got list"
    ),
    "half a slope": (lambda: headwise.alibi_slopes(1.5), TypeError, "num_heads is an int; got 1.5"),
    "numpy's step": (
        lambda: headwise.dilated(np.int64(2)), TypeError, "step is an int; got 2 of type int64; convert with int()"
    ),
    "a huge number of slopes": (lambda: headwise.alibi_slopes(10**400), ValueError, "num_heads is at most 1048576"),
    "a number for a cache": (
        lambda: mha()(X, cache=3), TypeError, "with lengths, append() and attend(); int has no lengths, append, attend"
    ),
    "lists for tokens": (
        lambda: filled("static").append([1], [2]), TypeError, "key is a tensor (B, K, T, n) of torch.float32; got list"
    ),
    "float64 for a float32 module": (
        lambda: mha()(X.double()),
        ValueError,
        "x and the module's weights share one dtype and device: the weights are float32 (12, 12) on cpu; got float64 "
        "(2, 5, 12) on cpu; move one of them with .to()",
    ),
    "x elsewhere": (lambda: mha()(X.to("meta")), ValueError, "got float32 (2, 5, 12) on meta; move one of them"),
    "memory of another dtype": (lambda: mha()(X, X.half()), ValueError, "the memory of the keys and the module's"),
    "lengths without a cache": (lambda: mha()(X, lengths=[1, 2]), ValueError, "lengths needs cache="),
    "keys of int8 with scales elsewhere": (
        lambda: headwise.attention(
            Q, cache.Quantized(cache.quantize(KEY).data, cache.quantize(KEY).scale.to("meta")), cache.quantize(VALUE)
        ),
        ValueError,
        "a quantised key is data, int8 (B, K, S, D), and scale, float32 (B, K, S) on one device",
    ),
    "a text for return_lse": (
        lambda: headwise.attention(Q, KEY, VALUE, return_lse="no"), TypeError, "return_lse is True or False; got 'no'"
    ),
    "a mask for other sizes": (
        lambda: headwise.keep(torch.ones(T, S) > 0).allowed(3, S), ValueError, "(B, H, 3, 7); got bool (5, 7) on cpu"
    ),
    "segments for other sizes": (
        lambda: headwise.segments(torch.zeros(T).long()).allowed(3, T), ValueError, "a position, 3 here; got int64 (5,)"
    ),
    "a row that is not there": (
        lambda: headwise.keep(torch.ones(T, S) > 0).allowed(T, S, rows=torch.tensor([T])),
        ValueError,
        "rows are positions 0 <= index < 5 here; got 5 to 5",
    ),
    "no heads": (lambda: headwise.weights(Q, KEY, heads=[]), ValueError, "heads are one or more; got none"),
    "a page of nobody": (lambda: filled("paged").pool.give(5), ValueError, "page 5 of this pool is free"),
    "no page of the pool": (lambda: filled("paged").pool.hold(-1), ValueError, "ints from 0 to 5; got -1"),
    "a gate that is none, with a cache": (lambda: stepped(gate=0.5), TypeError, "gate is a float tensor (H,), (B, H)"),
    "a mask that is none, with a cache": (lambda: stepped(mask=3), TypeError, "mask is a Mask (causal(), window(), "),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_what_was_found_is_said(name: str) -> None:
    call, error, text = KNOWN[name]
    with pytest.raises(error) as caught:
        call()
    assert fault_of(caught.value) is None
    assert text in str(caught.value)

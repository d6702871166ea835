"""Every case of the benchmark runs, at a length a test affords, and its ways agree: a table compares like with like."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draw import drawn
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import (  # noqa: E402
    attention,
    clock,
    encoders,
    hf_end_to_end,
    hf_small,
    limits,
    llama_cpp,
    masks,
    overhead,
    reshape,
    server_peers,
    serving,
    table,
    train,
    ways,
)
from benchmarks.registry import AVX2, CASES, FOLD, PEERS, Case, Mark  # noqa: E402
from scripts import train_encoder  # noqa: E402

pytestmark = pytest.mark.slow
QUICK = ("flex", *PEERS)  # compiling takes seconds a case; the others are looked at below


def reduced(case: Case) -> Case:
    return replace(case.short(), without=QUICK)


@pytest.mark.parametrize("case", [*CASES, *AVX2, *FOLD[:3]], ids=lambda case: case.name)
def test_the_ways_of_a_case_agree(case: Case) -> None:
    short = reduced(case)
    line = ways.lineup(short)
    assert "torch" in line.runs and "torch" not in line.absent, line.absent
    if case.kind == "full" and case.H != case.K and not case.backward:
        assert "folded" in line.runs, line.absent
    with torch.set_grad_enabled(case.backward):
        truth = line.runs.pop("headwise")()
        assert truth.shape == (short.B, short.H, short.T, short.value_dim)
        line.runs.pop("near", None)  # the same work on other numbers
        for name, run in line.runs.items():
            tolerance = 2e-2 if case.dtype in ("bfloat16", "float16") else 1e-4
            assert ways.difference(run(), truth) < tolerance, name


@pytest.mark.unchecked
def test_flex_agrees() -> None:
    kinds = [("prefill", "causal"), ("window", "window"), ("padding", "padded"), ("decode", "full")]
    for wanted in drawn(kinds):
        case = next(case for case in CASES if (case.regime, case.kind) == wanted and case.dtype == "float32")
        line = ways.lineup(replace(case.short(), without=QUICK[1:]))
        assert "flex" in line.runs, (case.name, line.absent)


@pytest.mark.parametrize("peer", ("onnxruntime", "openvino"))
def test_a_peer_takes_part_where_it_is_installed_and_is_named_where_not(peer: str) -> None:
    try:
        __import__(peer)
        installed = True
    except ImportError:
        installed = False
    for case in (CASES[2], CASES[3], next(case for case in CASES if case.regime == "decode")):
        line = ways.lineup(replace(case.short(), without=tuple(name for name in QUICK if name != peer)))
        assert (peer in line.runs) == installed, line.absent
        assert installed or "is not installed" in line.absent[peer]


@pytest.mark.parametrize("peer", ("vllm", "sglang"))
def test_the_kernels_of_servers_agree_where_they_are_and_are_named_where_not(
    peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = next(case for case in CASES if case.regime == "decode" and case.dtype == "bfloat16").short()
    case = replace(short, D=64, without=tuple(name for name in QUICK if name != peer))
    if server_peers.FOLDER.exists():
        assert peer in ways.lineup(case).runs
    monkeypatch.setattr(server_peers, "FOLDER", ROOT / "nowhere")
    server_peers._operators.cache_clear()
    assert "make bench-peers" in ways.lineup(case).absent[peer]
    server_peers._operators.cache_clear()


def test_whole_decode_steps_are_timed_and_a_missing_llama_cpp_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_LLAMA_CPP", "/nowhere/index.js")
    tiny = llama_cpp.config(layers=2, hidden=24, heads=4, kv_heads=2, vocab=300)
    monkeypatch.setattr(llama_cpp, "STEPS", 2)
    report = llama_cpp.measured(tiny, [5], torch.bfloat16, turns=1)
    [row] = report["results"]
    assert list(row["ms"]) == ["sdpa", "headwise", "fast_decode"] and "make bench-peers" in row["absent"]["llama.cpp"]
    llama_cpp.print_table(report)


def test_ways_of_an_encoder_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ("onnxruntime", "openvino", "ctranslate2"):  # exporting takes seconds
        monkeypatch.setattr(encoders, f"of_{other}", lambda *inputs: 1 // 0)
    ways, absent = encoders.lineup(encoders.config(layers=2, hidden=24, heads=3), 5, 7, True, tmp_path)
    assert len(absent) == 5 and all("ZeroDivisionError" in why for why in absent.values())
    real = encoders.sentences(5, 7, True)[1].bool()
    with torch.inference_mode():
        for dtype, tolerance in (("fp32", 1e-5), ("bf16", 3e-2)):
            outs = [ways[f"{attention} {dtype}"]().float()[real] for attention in ("headwise", "sdpa")]
            assert (outs[0] - outs[1]).norm() < tolerance * outs[1].norm()


def test_names_are_unique_and_kinds_are_known() -> None:
    names = [case.name for case in (*CASES, *AVX2, *FOLD)]
    assert len(set(names)) == len(names)
    with pytest.raises(ValueError, match="no such kind"):
        Case("odd", 1, 1, 1, 1, 1, 1, kind="diagonal").mask()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_work_is_counted_as_the_mask_allows_it(case: Case) -> None:
    short, mask = case.short(), case.short().mask()
    seen = torch.ones(short.B, 1, short.T, short.S)
    if mask is not None and not case.kind.endswith(("-bias", "dense-keep")):  # pairs kept at random leave no tile out
        seen = mask.dense(short.T, short.S).expand(short.B, 1, -1, -1).float()
    assert short.flops() == 2 * short.H * seen.sum().item() * (short.D + short.value_dim)
    if case.T == 1:
        of_key = short.K * (short.D if case.V else 2 * short.D)
        wanted = of_key * getattr(torch, case.dtype).itemsize
        if case.int8:  # and two scales
            wanted = of_key + short.K * 2 * 4
        assert short.bytes_read() == seen.sum().item() * wanted


def test_a_way_that_computes_something_else_takes_no_part() -> None:
    truth = torch.ones(3)
    wrong, broken = (lambda: 1.1 * truth), (lambda: truth * torch.nan)
    forms: dict[str, Callable[[], ways.Run]] = {"wrong": lambda: wrong, "nan": lambda: broken}
    with pytest.raises(LookupError, match="another result"):
        ways.fastest(forms, truth)
    with pytest.raises(LookupError, match="ZeroDivisionError"):
        ways.fastest({"broken": lambda: lambda: torch.ones(1 // 0)}, truth)
    right = lambda: truth  # noqa: E731
    assert ways.fastest({**forms, "right": lambda: right}, truth) is right


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    marks = (Mark("limit", 1e-9, 1e-8), Mark("torch", 1e9), Mark("flex", 1.0))
    cases = [replace(reduced(case), marks=marks) for case in (CASES[0], next(c for c in CASES if c.T == 1))]
    rows = list(attention.rows(cases, rounds=1, budget=0.0))
    record: dict[str, Any] = {"machine": clock.machine(), "results": json.loads(json.dumps(rows))}
    table.print_table(record, Console(width=200))
    text = capsys.readouterr().out
    assert all(case.name in text for case in cases)
    measured = limits.compiled() is not None
    assert [mark["met"] for mark in rows[0]["marks"]] == [True if measured else None, False, None]
    assert ("met, aim too" in text) == measured and "missed" in text and "not measured" in text
    if measured:
        assert {"fma", "reading"} >= {row["limit"]["by"] for row in rows}
    assert set(record["machine"]) >= {"cpu", "cores", "threads", "isa", "torch", "headwise", "load", "onnxruntime"}


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = reduced(CASES[0])
    monkeypatch.setitem(attention.SETS, "table", (small, reduced(CASES[4])))
    monkeypatch.setattr(attention, "AVX2", ())
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["attention.py", "--only", small.name, "--rounds", "1", "--json"])
    attention.main()
    assert [row["case"] for row in json.loads(capsys.readouterr().out)["results"]] == [small.name]
    assert not list(tmp_path.iterdir()), "a part of the table is no result to keep"
    monkeypatch.setattr(sys, "argv", ["attention.py", "--rounds", "1", "--budget", "0"])
    attention.main()
    assert len(json.loads(next(tmp_path.glob("*-attention.json")).read_text())["results"]) == 2


def test_a_process_is_held_to_avx2() -> None:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this CPU has no AVX2")
    rows = attention.held_to_avx2("avx2 32/8.*fp32", rounds=1, budget=0.0)
    assert [row["regime"] for row in rows] == ["avx2"]


def test_rounds_in_which_others_used_the_cpu_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    excess = iter([0.5, -0.05, 0.5, -0.05, -0.05])
    monkeypatch.setattr(clock.Foreign, "excess", lambda self: next(excess))
    timing = clock.measure({"a": lambda: None, "b": lambda: None}, {"one": lambda: 1.0}, rounds=3, seconds=60.0)
    assert (len(timing.seconds["a"]), timing.left_out, timing.disturbed) == (3, 2, False)
    assert timing.limits["one"] == [1.0] * 3


def test_where_all_rounds_are_disturbed_the_least_disturbed_count(monkeypatch: pytest.MonkeyPatch) -> None:
    excess, limit = iter([0.9, 0.1, 0.2, 0.3, 0.4, 0.5]), iter(range(1, 7))
    monkeypatch.setattr(clock.Foreign, "excess", lambda self: next(excess))
    timing = clock.measure({"a": lambda: None}, {"one": lambda: float(next(limit))}, rounds=2, seconds=60.0)
    assert (timing.limits["one"], timing.left_out, timing.disturbed) == ([2.0, 3.0], 4, True)


@pytest.mark.parametrize(("seconds", "count"), [(0.0, 2), (0.4, 2), (0.8, 3), (4.5, 5), (100.0, 9)])
def test_three_rounds_may_take_four_times_the_time(seconds: float, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    timing = measured_by_turns_of(1.0, seconds, monkeypatch)
    assert (len(timing.seconds["a"]), timing.disturbed) == (count, count < clock.LEAST)


def test_a_short_case_has_three_rounds_when_no_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = measured_by_turns_of(0.1, 0.0, monkeypatch)
    assert (len(timing.seconds["a"]), timing.disturbed) == (clock.LEAST, False)


def measured_by_turns_of(length: float, seconds: float, monkeypatch: pytest.MonkeyPatch) -> clock.Rounds:
    """Up to nine rounds on a quiet machine, of one turn of so many seconds each."""
    turns: list[float] = []
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: sum(turns)))
    monkeypatch.setattr(clock, "turn", lambda run: turns.append(length) or 0.5)
    monkeypatch.setattr(clock.Foreign, "excess", lambda self: -1.0)
    return clock.measure({"a": lambda: None}, {}, rounds=9, seconds=seconds)


def test_a_slow_way_sits_rounds_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "turn", lambda run: run())
    monkeypatch.setattr(clock.Foreign, "excess", lambda self: -1.0)
    timing = clock.measure({"fast": lambda: 0.5, "slow": lambda: 2.0}, {}, rounds=5, seconds=60.0)
    assert timing.seconds == {"fast": [0.5] * 5, "slow": [2.0] * 3 + [None] * 2}
    assert timing.ratio("slow", "fast") == 4.0 and timing.summary("slow")["runs"] == 3


def test_the_load_of_others_is_what_the_machine_did_and_we_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "own_cpu", iter([1.0, 1.5]).__next__)
    monkeypatch.setattr(clock, "machine_cpu", iter([10.0, 11.0]).__next__)
    assert clock.Foreign().load() == pytest.approx(0.5)


def test_limits_are_of_the_right_size() -> None:
    if limits.compiled() is None:
        pytest.skip("no C++ compiler")
    for rate in (limits.arithmetic("float32", 0.01), limits.arithmetic("bfloat16", 0.01)):
        assert rate is not None and 1e8 < rate < 1e15
    rate = limits.reading([torch.ones(300_000), torch.ones(1001)], 0.01)
    assert rate is not None and 1e7 < rate < 1e14


def test_without_a_compiler_the_table_has_no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "compiled", lambda: None)
    (row,) = attention.rows([reduced(CASES[0])], rounds=1, budget=0.0)
    assert row["limit"] is None and row["marks"][0]["of"] == "torch"


def test_call_overhead_is_told_for_each_way() -> None:
    report = overhead.measured(rounds=1, calls=3)
    assert {"headwise", "torch"} <= set(report["full"]) and all(us > 0 for us in report["full"].values())
    step = report["step, latent, static int8"]
    assert set(step) == {"in one call", "in several", "linears and attention"} and all(us > 0 for us in step.values())


def test_a_model_runs_end_to_end_with_each_attention() -> None:
    tiny = hf_end_to_end.config(hidden=32, heads=4, kv_heads=2, intermediate=48, vocab=64)
    report = hf_end_to_end.measured(tiny, prefill=(8,), decode=(12,), rounds=1)
    for row in report["results"]:
        assert (
            set(row["tokens_per_second"]) == set(hf_end_to_end.ATTENTIONS) and max(row["differences"].values()) < 0.05
        )


@pytest.mark.parametrize("name", list(hf_small.MODELS))
def test_small_models_give_the_logits_of_transformers(name: str) -> None:
    layers = next(x for x in hf_small.MODELS[name][1] if "layer" in x)
    few = {layers: 1, "attention_types": [[["global"], 1]]} if name == "GPT-Neo" else {layers: 1}
    report = hf_small.measured((name,), tokens=9, rounds=1, seconds=0.0, vocab_size=64, **few)
    (row,) = report["results"]
    assert row["difference"] < 0.05 and set(row["tokens_per_second"]) == {"transformers", "headwise"}
    hf_small.print_table(report)


def test_requests_are_served_with_each_attention(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = serving.config(hidden=128, layers=1, vocab=61)
    report = serving.measured(tiny, [serving.Case("prompts", 3, 2, 70, 2)], rounds=1)
    for row in report["results"]:
        assert set(row["tokens_per_second"]) == set(serving.WAYS) and set(row["answers_as_sdpa"].values()) == {3}
    serving.print_table(report)
    assert "3 of 3" in capsys.readouterr().out


def test_training_goes_with_each_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = {"eager": [3.0, 2.0], "headwise": [3.0, 2.5]}
    for name, its in losses.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "losses.json").write_text(json.dumps({"settings": {}, "losses": its}))
    report = train.measured([(2, 24)], [tmp_path / name for name in losses], rounds=1)
    for row in report["results"]:
        first = row["first_losses"]
        assert set(first) == set(train.ATTENTIONS) and max(first.values()) - min(first.values()) < 0.01
    assert report["curves"][1]["difference_most"] == 0.5 and report["curves"][1]["last"] == 2.75
    train.print_table(report)
    assert "headwise" in capsys.readouterr().out


def test_committed_results_tell_machine_and_versions_and_no_path() -> None:
    texts = [file.read_text() for file in (ROOT / "benchmarks" / "results").glob("*.json")]
    assert texts
    for text in texts:
        record = json.loads(text)
        tables = [table for name, table in record.items() if name != "machine" and isinstance(table, (dict, list))]
        assert {"cpu", "torch", "load", "isa"} <= set(record["machine"]) and any(tables)
        assert "/work" not in text and "/root" not in text and "/home" not in text


@pytest.mark.parametrize("length", [1, 100, 299, 599, 8192])
def test_every_token_of_the_masks_rows_has_a_document(length: int) -> None:
    assert len(masks.documents(length)) == length


def small_reshape_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little text, so that the benchmark of reshaping runs within a test."""
    for name, size in (("HELD", 1), ("CALIBRATION", 4), ("LENGTH", 17), ("ALONE", 1)):
        monkeypatch.setattr(reshape, name, size)
    monkeypatch.setattr(reshape.tiny_data, "read", lambda paths: [f"x = {path.name!r}\n" * 40 for path in paths[:2]])


def test_reshaping_measures_a_row_and_draws_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise import hf
    from headwise.models import tiny_path

    small_reshape_text(monkeypatch)
    kept: list[dict[str, Any]] = []
    with hf.checkpoint(tiny_path()) as source:
        bench = reshape.Bench(source, hf.load(tiny_path()), reshape.Text(tiny_path(), files=2), kept.append)
        bench.regroup(1, "mean", values=False)
        bench.distill(1, "mean", recovered=False, steps=1, lr=1e-3)
    [row] = kept[-1]["regroup"]
    assert row["W_O"] > kept[-1]["original"] and row["loss"] > kept[-1]["original"]
    assert kept[-1]["model"]["type"] == "llama" and kept[-1]["model"]["seed"] == 0
    pruned = {"keep": 7, **{f"{name}{end}": 3.0 for name in ("random", *reshape.CRITERIA) for end in ("", ", W_O")}}
    reshape.draw([kept[-1] | {"prune": [pruned]}], tmp_path)
    reshape.draw([{"model": {"type": "bert"}, "original": 2.0, "prune": [pruned]}], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"reshape-{n}.png" for n in ("distill", "prune-encoder", "prune", "regroup")
    ]


def test_an_encoder_is_trained_stopped_and_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BertConfig

    from headwise import hf
    from headwise.reshape import random_scores

    small_reshape_text(monkeypatch)
    monkeypatch.setattr(train_encoder, "LENGTH", 17)
    monkeypatch.setattr(reshape, "KEEP", (4,))
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 16}
    monkeypatch.setattr(train_encoder, "BertConfig", lambda **sizes: BertConfig(**sizes | small))
    options = {
        "run": tmp_path,
        "seed": 0,
        "attention": "headwise",
        "lr": 3e-3,
        "rows": 2,
        "threads": 1,
        "measure_every": 2,
    }
    runs = {name: argparse.Namespace(**options, out=tmp_path / name, steps=3) for name in ("whole", "stopped")}
    for args in runs.values():
        args.out.mkdir()
    stopped = train_encoder.Run(runs["stopped"])
    stopped.train_step(), stopped.train_step(), stopped.measure(7.0)
    for args in runs.values():
        run = train_encoder.Run(args)
        run.train()
        run.export()
    ends = [torch.load(args.out / "checkpoint.pt")["model"] for args in runs.values()]
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
    loaded = hf.load(tmp_path / "whole")
    with hf.checkpoint(tmp_path / "whole") as source:
        bench = reshape.Bench(source, loaded, reshape.Words(tmp_path / "whole", files=2), lambda report: None)
        bench.prune()
        [query] = (part.query.weight for part in bench.smaller(4, random_scores()).modules() if hasattr(part, "query"))
    [row] = bench.report["prune"]
    assert query.shape == (16, 32) and row["keep"] == 4 and {*reshape.CRITERIA, "random, W_O"} < row.keys()


def test_words_to_tell_are_hidden_as_in_berts_paper() -> None:
    ids = torch.randint(2, train_encoder.data.VOCAB_SIZE, (97, 128), generator=torch.Generator().manual_seed(0))
    ids[:, 0], ids[:, -1] = train_encoder.data.BOS_ID, train_encoder.data.EOS_ID
    read, places = train_encoder.hide(ids, torch.Generator().manual_seed(1))
    assert not places[:, [0, -1]].any() and torch.equal(read[~places], ids[~places])
    assert places.sum(1).unique().tolist() == [round(train_encoder.HIDDEN_SHARE * 126)] == [38]
    assert ((read == train_encoder.MASK_ID) & places).sum(1).unique().tolist() == [30]
    own = ((read == ids) & places).sum(1)
    assert own.min() == 4 and own.float().mean() < 4.1, "but where chance draws the same token"
    assert places[:, 1:-1].float().mean(0).std() < 0.1 and len(places.unique(dim=0)) == 97

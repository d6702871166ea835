"""One model in several threads: what one thread watches is what it calls, and no other thread notices."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import hf_seam_models as own_code
import pytest
import torch
from hf_models import BY_NAME, inputs, logits
from test_hf_probe import assert_same_state, state_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headwise
import headwise.hf
from headwise.hf.models.support import configs
from headwise.nn import probe
from headwise.nn.hooks.eval_mode import in_eval_mode
from headwise.nn.hooks.output_projections import output_projections

Result = TypeVar("Result")
IDS = [1, 2, 3, 5, 8, 13, 21, 34]


class Reader(nn.Module):
    """A small decoder of our own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(97, 12)
        self.attend = headwise.MultiHeadAttention(12, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.attend(self.embed(ids), mask=headwise.causal()) @ self.embed.weight.T


@pytest.fixture
def other() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Runs a function in another thread, always the same one, and gives what it gives."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function: pool.submit(function).result(60)


def built(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    if kind == "ours":
        return Reader(), {"ids": torch.tensor([IDS])}
    if kind == "Bloom":
        return own_code.BY_NAME[kind].build(), {"input_ids": torch.tensor([IDS])}
    return BY_NAME[kind].build(), inputs(BY_NAME[kind])


def run(model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    return logits(model, arguments) if "ids" not in arguments else model(**arguments).detach()  # type: ignore[arg-type]


def nothing(call: headwise.nn.AttentionCall) -> Tensor:
    """What takes an attention's place."""
    return torch.zeros_like(call.attend())


def half(call: headwise.nn.AttentionCall) -> Tensor:
    """What takes it in another thread."""
    return call.attend() / 2


KINDS = ["ours", "Llama GQA", "T5", "Bloom"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_forward_beside_a_probe_is_plain_and_is_not_seen(kind: str, other: Any) -> None:
    model, arguments = built(kind)
    expected = run(model, arguments)
    with probe(model, nothing) as seen:
        names = [config._attn_implementation for config in configs(model)]
        assert torch.equal(other(lambda: run(model, arguments)), expected), "to the bit"
        assert seen.seen == 0
        assert kind == "ours" or other(lambda: [config._attn_implementation for config in configs(model)]) != names
        ours = run(model, arguments)
        assert seen.seen and not torch.equal(ours, expected)
    assert torch.equal(run(model, arguments), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_probes_of_two_threads_end_in_any_order(kind: str, other: Any) -> None:
    model, arguments = built(kind)
    wanted, alone = run(model, arguments), {}
    for each in (nothing, half):
        with probe(model, each):
            alone[each] = run(model, arguments)
    before = state_of(model)
    one, two = probe(model, nothing), probe(model, half)
    seen = one.__enter__()
    theirs = other(two.__enter__)
    assert torch.equal(other(lambda: run(model, arguments)), alone[half])
    assert torch.equal(run(model, arguments), alone[nothing])
    assert seen.seen == theirs.seen
    one.__exit__(None, None, None)
    assert torch.equal(run(model, arguments), wanted)
    assert torch.equal(other(lambda: run(model, arguments)), alone[half]), "still open"
    assert theirs.seen == 2 * seen.seen
    other(lambda: two.__exit__(None, None, None))
    assert_same_state(before, state_of(model))
    assert torch.equal(run(model, arguments), wanted)


def test_a_model_that_two_threads_rest_rests_until_both_have_done(other: Any) -> None:
    model = Reader().train()
    model.attend.eval()
    modes = {name: part.training for name, part in model.named_modules()}
    one, two = in_eval_mode(model), in_eval_mode(model)
    one.__enter__()
    other(two.__enter__)
    one.__exit__(None, None, None)
    assert not any(part.training for part in model.modules())
    other(lambda: two.__exit__(None, None, None))
    assert {name: part.training for name, part in model.named_modules()} == modes


@pytest.mark.unchecked
def test_compiled_models_run_uncompiled_until_the_last_probe_ends(other: Any) -> None:
    runs = []

    def backend(graph: Any, _: object) -> Any:
        return lambda *args: runs.append(1) or graph.forward(*args)

    model = Reader()
    compiled, ids = torch.compile(model, backend=backend), torch.tensor([IDS])
    compiled(ids)
    one, two = probe(model), probe(model)
    one.__enter__()
    theirs = other(two.__enter__)
    compiled(ids)
    one.__exit__(None, None, None)
    other(lambda: compiled(ids))
    other(lambda: two.__exit__(None, None, None))
    assert theirs.seen == 1 and len(runs) == 1
    compiled(ids)
    assert len(runs) == 2


def measurements(model: nn.Module, arguments: dict[str, Any]) -> list[Callable[[], Any]]:
    """What looks at a model with hooks of its own."""
    return [
        lambda: replace(headwise.look.importance(model, IDS, by=["gradient", "zero", "mean"]), seconds=0.0).to_json(),
        lambda: replace(headwise.look.at(model, IDS), seconds=0.0).to_json(),
        lambda: headwise.look.circuits(model, IDS).to_json(),
        lambda: headwise.look.ablate(model, IDS, [(0, 1)], by="mean").to_json(),
        lambda: output_projections(model, lambda model: run(model, arguments)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ours", "Llama GQA"])
def test_another_thread_may_run_the_model_in_the_middle(kind: str, other: Any) -> None:
    """Wherever a measurement is in the model: here after each of its matrices and norms."""
    model, arguments = built(kind)
    jobs = measurements(model, arguments)
    expected, plain, here = [job() for job in jobs], run(model, arguments), threading.get_ident()

    def beside(*_: Any) -> None:
        if threading.get_ident() == here:
            assert torch.equal(other(lambda: run(model, arguments)), plain)

    for part in model.modules():
        if not any(True for _ in part.children()):
            part.register_forward_hook(beside)
            part.register_forward_pre_hook(beside)
    for job, wanted in zip(jobs, expected, strict=True):
        assert job() == wanted


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ours", "Llama GQA"])
def test_what_is_measured_is_not_changed_by_what_runs_beside_it(kind: str) -> None:
    """Importance and ablation, look and circuits in two threads, with plain forwards in a third."""
    model, arguments = built(kind)
    plain = run(model, arguments)
    jobs = measurements(model, arguments)
    expected = [job() for job in jobs]

    def forwards() -> None:
        for _ in range(60):
            torch.testing.assert_close(run(model, arguments), plain, atol=0, rtol=0)

    with ThreadPoolExecutor(3) as pool:
        done = [pool.submit(forwards), *(pool.submit(lambda: [job() for job in jobs]) for _ in range(2))]
        done[0].result(120)
        for one in done[1:]:
            assert one.result(120) == expected


def test_an_answer_is_for_the_thread_that_asked(other: Any) -> None:
    """Another thread calls the inner part between this one's question and its computing."""
    model, ids, theirs = Reader(), torch.tensor([IDS]), list[Tensor]()
    wanted = model(ids).detach()

    def between(*_: Any) -> None:
        hook.remove()
        theirs.append(other(lambda: run(model, {"ids": ids})))

    with probe(model, nothing):
        hook = model.attend.inner.register_forward_pre_hook(between)
        out = model(ids).detach()
    assert torch.equal(theirs[0], wanted) and not torch.equal(out, wanted)
    with probe(model, nothing):
        assert torch.equal(model(ids), out)


def test_what_autograd_runs_again_in_a_thread_of_its_own_is_the_openers() -> None:
    """As it does for tensors of a GPU. Such a thread is not Python's: here one is started behind its back."""
    model, ids, seen_by = Reader(), torch.tensor([IDS]), list[int]()

    def in_a_thread(function: Callable[[], Any]) -> None:
        done: list[Any] = []
        _thread.start_new_thread(lambda: done.append(function()), ())
        while not done:
            time.sleep(0.001)

    with probe(model) as seen:
        out = checkpoint(model, ids, use_reentrant=False).sum()
        for step in (lambda: model(ids), out.backward):
            seen_by.append(seen.seen)
            in_a_thread(step)
        seen_by.append(seen.seen)
    assert seen_by == [1, 1, 2]

"""Distillation: the loss falls, a stopped run goes on to the same result, several processes do what one does."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disks import files_of_at_most
from torch import Tensor, nn

import headwise
from headwise.distributed.workers import Processes
from headwise.reshape.repair.distill import DistillConfig, distill, divergence

VOCABULARY = 23


class Model(nn.Module):
    """One layer of attention over embedded ids."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.drop = nn.Embedding(VOCABULARY, 12), nn.Dropout(0.5)
        self.attend, self.out = headwise.MultiHeadAttention(12, 3), nn.Linear(12, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.out(self.drop(x + self.attend(x, mask=headwise.causal())))


def stream() -> Tensor:
    return torch.randint(VOCABULARY, (301,), generator=torch.Generator().manual_seed(1))


RECIPE = DistillConfig(12, rows=3, length=17, lr=0.02, warmup=2, weight_decay=0.1, text=0.1, seed=5)


def run(student: Model, config: DistillConfig = RECIPE, **options: Any) -> Any:
    return distill(student, Model(0), stream(), config, call=lambda model, ids: model(ids), **options)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_student_comes_to_say_what_the_teacher_says() -> None:
    held_out = torch.randint(VOCABULARY, (4, 29))
    student = Model(1).train()
    calls: list[tuple[int, int]] = []
    config = DistillConfig(40, rows=4, length=17, lr=0.03, warmup=2)
    curve = run(student, config, held=held_out, first=2, every=20, progress=lambda *n: calls.append(n))
    assert [step for step, *_ in curve.held] == [0, 20, 40] and len(curve.steps) == 40
    assert curve.steps == [round(loss, 6) for loss in curve.steps], "short enough to be read in a file"
    assert curve.held[-1][1] < 0.2 * curve.held[0][1]
    assert calls == [(n, 40) for n in range(1, 41)]
    assert all(part.training for part in student.modules()), "the mode that it was in"
    with torch.no_grad():
        far = divergence(student.eval()(held_out), Model(0).eval()(held_out)) / held_out.numel()
    assert float(far) == pytest.approx(curve.held[-1][1], rel=1e-4)


def test_the_divergence_is_that_of_the_distributions() -> None:
    said, known = torch.randn(3, 5, 7), torch.randn(3, 5, 7)
    expected = nn.functional.kl_div(said.log_softmax(-1), known.softmax(-1), reduction="sum")
    assert torch.allclose(divergence(said, known), expected)
    assert divergence(said, said + 3).abs() < 1e-4


def test_the_text_s_own_loss_counts_by_its_weight() -> None:
    """Of the first step, before any weight has changed: a mean of places of each window, and of the windows."""
    text, losses = stream(), {}
    for weight in (0.0, 0.5):
        config = DistillConfig(1, rows=3, length=17, text=weight, seed=5)
        losses[weight] = run(Model(1), config).steps[0]
    student, teacher = Model(1).eval(), Model(0).eval()
    rows = DistillConfig(1, rows=3, length=17, seed=5).batch(text, 0)
    with torch.no_grad():
        said, known = student(rows), teacher(rows)
    own = nn.functional.cross_entropy(said[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    assert losses[0.0] == pytest.approx(float(divergence(said, known) / rows.numel()), abs=2e-6)
    assert losses[0.5] == pytest.approx(losses[0.0] + 0.5 * float(own), abs=2e-6)


def test_tokens_that_cannot_come_add_nothing_to_the_divergence() -> None:
    """Where the teacher's logit is -inf its probability is 0, and 0 log 0 is 0, whatever the student says."""
    said, known = torch.randn(3, 5, 7), torch.randn(3, 5, 7)
    known[..., 2] = -math.inf
    expected = nn.functional.kl_div(said.log_softmax(-1), known.softmax(-1), reduction="sum")
    said.requires_grad_()
    far = divergence(said, known)
    (gradient,) = torch.autograd.grad(far, said)
    assert torch.allclose(far, expected) and torch.allclose(gradient, said.softmax(-1) - known.softmax(-1), atol=1e-6)
    both = said.detach().masked_fill(torch.arange(7) == 2, -math.inf)
    expected = divergence(both[..., [0, 1, 3, 4, 5, 6]], known[..., [0, 1, 3, 4, 5, 6]])
    assert torch.allclose(divergence(both, known), expected)
    assert divergence(both, known.nan_to_num(neginf=0.0)) == math.inf, "what comes and is ruled out is as far as can be"


def test_a_run_that_was_stopped_goes_on_to_the_same_result(tmp_path: Path) -> None:
    whole = Model(1)
    curve = run(whole)
    halves = Model(1)

    class Stop(Exception): ...

    def stop(done: int, total: int) -> None:
        if done == 7:  # the last state is that of step 5
            raise Stop

    with pytest.raises(Stop):
        run(halves, state=tmp_path / "state.pt", every=5, progress=stop)
    assert os.listdir(tmp_path) == ["state.pt"]
    assert torch.load(tmp_path / "state.pt", weights_only=True)["step"] == 5
    again = Model(2)  # its own weights do not count: those of the state do
    went_on = run(again, state=tmp_path / "state.pt", every=5)
    assert torch.equal(weights(again), weights(whole)) and went_on.steps == curve.steps
    done = Model(3)
    assert run(done, state=tmp_path / "state.pt", every=5).steps == curve.steps, "a run that is done stays done"
    assert torch.equal(weights(done), weights(whole))


def test_a_state_that_cannot_be_written_is_told_before_a_step(tmp_path: Path) -> None:
    calls: list[int] = []
    with pytest.raises(FileNotFoundError, match=r"cannot write .*: its folder does not exist"):
        run(Model(1), state=tmp_path / "none" / "state.pt", progress=lambda done, total: calls.append(done))
    assert not calls


def test_a_state_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(Model(1), DistillConfig(2, rows=1, length=9), state=tmp_path / "state.pt")
    before = (tmp_path / "state.pt").read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    (tmp_path / "other").mkdir()
    for folder in (tmp_path, tmp_path / "other"):
        with pytest.raises((OSError, ValueError)):
            run(Model(1), DistillConfig(3, rows=1, length=9), state=folder / "state.pt", every=1)
    assert (tmp_path / "state.pt").read_bytes() == before and not os.listdir(tmp_path / "other")


def test_a_state_for_which_there_is_no_room_is_told_by_its_name(tmp_path: Path) -> None:
    with files_of_at_most(2000), pytest.raises(OSError) as caught:
        run(Model(1), DistillConfig(3, rows=1, length=9), state=tmp_path / "state.pt", every=1)
    line = (
        f"cannot write {tmp_path}/state.pt, the state of the run: File too large; free some space, or give another path"
    )
    assert str(caught.value) == line and not os.listdir(tmp_path)


@pytest.mark.slow
def test_what_a_killed_run_left_of_its_state_is_cleared_by_the_next(tmp_path: Path) -> None:
    code = "import os, test_reshape_distill as here; os.fsync = lambda _: os.kill(os.getpid(), 9); "
    code += "here.run(here.Model(1), here.DistillConfig(2, rows=1, length=9), state='state.pt')"
    paths = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == -signal.SIGKILL and len(os.listdir(tmp_path)) == 1
    run(Model(1), DistillConfig(2, rows=1, length=9), state=tmp_path / "state.pt")
    assert os.listdir(tmp_path) == ["state.pt"]


def part_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    student = Model(1)
    curve = run(student, held=torch.arange(58).view(2, 29) % VOCABULARY, every=6, state=Path(folder) / "state.pt")
    torch.save((weights(student), curve.steps, curve.held), Path(folder) / f"rank{rank}")
    torch.distributed.destroy_process_group()


def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    """Three rows over two processes: unequal shares, the same sum."""
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=part_of_two, args=(rank, str(tmp_path))) for rank in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()
        assert one.exitcode == 0
    alone = Model(1)
    curve = run(alone, held=torch.arange(58).view(2, 29) % VOCABULARY, every=6)
    for rank in range(2):
        got, steps, points = torch.load(tmp_path / f"rank{rank}", weights_only=True)
        assert torch.allclose(got, weights(alone), atol=1e-4)
        assert steps == pytest.approx(curve.steps, abs=1e-4)
        assert [x for point in points for x in point] == pytest.approx(
            [x for point in curve.held for x in point], rel=1e-3
        )


def test_an_accelerator_places_and_runs_backward() -> None:
    """As accelerate's does: `prepare` hands back what to train, `backward` averages over processes."""

    class Accelerator:
        device = torch.device("cpu")
        backwards = 0

        def prepare(self, *things: Any) -> Any:
            return things

        def backward(self, loss: Tensor) -> None:
            self.backwards += 1
            loss.backward()

    plain, placed, accelerator = Model(1), Model(1), Accelerator()
    run(plain)
    run(placed, accelerator=accelerator)
    assert accelerator.backwards == RECIPE.steps and torch.equal(weights(plain), weights(placed))


def test_the_schedule_and_the_windows() -> None:
    rates = [RECIPE.rate(step) for step in range(RECIPE.steps)]
    assert rates[:2] == [0.01, 0.02] and rates[2] == pytest.approx(0.02)
    assert rates[2:] == sorted(set(rates[2:]), reverse=True) and rates[-1] > 0.0002
    text = stream()
    for step in (0, 3):
        rows = RECIPE.batch(text, step, first=9)
        assert (
            rows.shape == (3, 17) and (rows[:, 0] == 9).all() and torch.equal(rows, RECIPE.batch(text, step, first=9))
        )
        for row in rows:
            assert (text.unfold(0, 16, 1) == row[1:]).all(1).any(), "a window of the text"
    drawn = {
        tuple(DistillConfig(5, rows=3, length=17, seed=seed).batch(text, step).flatten().tolist())
        for seed in range(4)
        for step in range(5)
    }
    assert len(drawn) == 4 * 5, "no seed reads at one step what another reads at another"
    whole = DistillConfig(1, rows=2, length=301)  # a text of one window: whole, or behind the token that comes first
    assert torch.equal(whole.batch(text, 0), text.expand(2, -1))
    assert torch.equal(DistillConfig(1, rows=2, length=302).batch(text, 0, first=9)[:, 1:], text.expand(2, -1))
    assert Processes(1, 3).share(torch.arange(7)).tolist() == [1, 4]


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: DistillConfig(0), ValueError, "steps is at least 1; got 0"),
        (lambda: DistillConfig(5, length=1), ValueError, "length is at least 2; got 1"),
        (lambda: DistillConfig(5, lr=0.0), ValueError, "lr is a finite number above 0; got 0"),
        (lambda: DistillConfig(5, text=-1.0), ValueError, "text and weight_decay are at least 0; got -1.0 and 0.0"),
        (
            lambda: run(Model(1), DistillConfig(5, length=400)),
            ValueError,
            "a window is 400 tokens, and the text has 301",
        ),
        (
            lambda: run(Model(1), DistillConfig(1, length=302)),
            ValueError,
            "a window is 302 tokens, and the text has 301",
        ),
        (
            lambda: run(Model(1), DistillConfig(1, length=303), first=1),
            ValueError,
            "a window is 303 tokens, and the text has 301",
        ),
        (lambda: run(Model(1), every=0), ValueError, "every is at least 1; got 0"),
        (lambda: run(Model(1), state=3), TypeError, "state is a path, a string or a pathlib.Path; got 3"),
        (lambda: run(Model(1), state=""), ValueError, "state: the name is empty"),
        (lambda: distill(Model(1), Model(0), stream()[None], RECIPE), ValueError, r"stream is a row of ids \(N,\)"),
        (lambda: distill(Model(1), Model(0), [1, 2], RECIPE), TypeError, r"stream is a row of ids \(N,\); got list"),
    ],
)
def test_what_cannot_be_distilled_is_refused(make: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make()


def test_a_state_knows_its_text_and_its_teacher(tmp_path: Path) -> None:
    """A run that goes on reads on where it stopped: another text or teacher would be half of each."""
    config, state = DistillConfig(2, rows=1, length=9), tmp_path / "state.pt"

    def distill_on(text: Tensor, teacher: Model, **options: Any) -> Any:
        return distill(Model(1), teacher, text, config, call=lambda model, ids: model(ids), state=state, **options)

    held_out = stream()[:18].view(2, 9)
    distill_on(stream(), Model(0), held=held_out, first=3)
    assert distill_on(stream(), Model(0), held=held_out, first=3).steps
    other = stream()
    other[-1] = (other[-1] + 1) % VOCABULARY
    for text, options in (
        (other, {"first": 3}),
        (stream()[:-1], {"first": 3}),
        (stream(), {}),
        (stream(), {"first": 4}),
    ):
        with pytest.raises(ValueError, match=r"state.pt: the state of a run on another text; remove it to begin anew$"):
            distill_on(text, Model(0), held=held_out, **options)
    with pytest.raises(ValueError, match=r"state.pt: the state of a run on another text; remove it to begin anew$"):
        distill_on(stream(), Model(0), held=held_out + 1, first=3)
    nearly = Model(0)
    with torch.no_grad():
        nearly.out.bias[1] += 1  # of a small tensor every number counts
    for teacher in (Model(4), nearly):
        with pytest.raises(
            ValueError, match=r"state.pt: the state of a run with another teacher; remove it to begin anew$"
        ):
            distill_on(stream(), teacher, held=held_out, first=3)
    saved = torch.load(state, weights_only=True)
    torch.save({name: part for name, part in saved.items() if name not in ("text", "teacher")}, state)
    with pytest.raises(ValueError, match=r"state.pt: no state that a distillation left; remove it to begin anew$"):
        distill_on(stream(), Model(0), held=held_out, first=3)


@pytest.mark.unchecked
def test_the_state_of_another_run_is_refused(tmp_path: Path) -> None:
    run(Model(1), DistillConfig(2, rows=1, length=9), state=tmp_path / "state.pt")
    for content in (b"", b"garbage", pickle.dumps({"recipe": 1}), pickle.dumps(print)):
        (tmp_path / "other.pt").write_bytes(content)
        with pytest.raises(ValueError, match=r"other.pt: no state that a distillation left; remove it to begin anew"):
            run(Model(1), DistillConfig(2, rows=1, length=9), state=tmp_path / "other.pt")
    torch.save({"recipe": {}}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other.pt: no state that a distillation left"):
        run(Model(1), DistillConfig(2, rows=1, length=9), state=tmp_path / "other.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    torch.save({**saved, "student": {"x": torch.ones(1)}}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other.pt: the state of another model; remove it to begin anew"):
        run(Model(1), DistillConfig(2, rows=1, length=9), state=tmp_path / "other.pt")
    line = r"state.pt: the state of another run \(steps 2, not 3\); remove it, or distill as it says"
    with pytest.raises(ValueError, match=line):
        run(Model(1), DistillConfig(3, rows=1, length=9), state=tmp_path / "state.pt")

"""Heads as they form: what a watch keeps, when it measures, and that training goes on as if it were not there."""

from __future__ import annotations

import json
import math
import os
import random
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from planted import DELIMITERS, VOCABULARY, Planted, Tiny, text
from torch import Tensor

import headwise
from headwise import hf, look
from headwise.look import Curve, Look, Point, Repeats, Watch, read_curve
from headwise.look.collect import training as watch

IDS = text(17)
FEW = Repeats(sequences=2, length=37)


class Clock:
    """A clock of the test's own: a measurement takes a second, an update as long as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seen: Look) -> None:
        self.now = 100.0
        monkeypatch.setattr(watch.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(watch, "at", self.at)
        self.seen, self.fault, self.takes = seen, None, 1.0

    def at(self, *_: object, **__: object) -> Look:
        self.now += self.takes
        if self.fault is not None:
            raise self.fault
        return self.seen


@pytest.fixture(scope="module")
def seen() -> Look:
    return look.at(Planted(), IDS, delimiters=DELIMITERS, repeats=FEW, full_maps=False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, seen: Look) -> Clock:
    return Clock(monkeypatch, seen)


# --- training goes on as it would -------------------------------------------------------------------------------------


def trained(watched: bool, autocast: bool = False) -> tuple[list[Tensor], list[float]]:
    """Five updates of a model with dropout; its weights, and random numbers of every kind drawn on the way."""
    model = Tiny(mask=headwise.causal())
    model.layers[0].eval()  # a mode of its own, to be left alone
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    seen = Watch(model, IDS, every=2, repeats=FEW) if watched else None
    drawn = []
    for step in range(5):
        ids = torch.randint(VOCABULARY, (3, 11))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            if seen is not None:
                seen.step(step)
            loss = model(ids).float().square().mean()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.layers.parameters())
        optimizer.step()
        optimizer.zero_grad()
        drawn += [random.random(), np.random.random(), float(torch.rand(()))]
    assert model.training and model.drop.training and not model.layers[0].training
    assert seen is None or [point.step for point in seen.curve.points] == [0, 2, 4]
    return [parameter.detach() for parameter in model.parameters()], drawn


@pytest.mark.unchecked  # the checker draws from `random`
@pytest.mark.parametrize("autocast", [False, True])
def test_training_gives_the_same_weights_to_the_bit(autocast: bool) -> None:
    weights, drawn = trained(watched=False, autocast=autocast)
    watched, drawn_too = trained(watched=True, autocast=autocast)
    assert drawn == drawn_too
    assert all(torch.equal(a, b) for a, b in zip(weights, watched, strict=True))


class Noisy(Tiny):
    """Draws random numbers of every kind in each forward, in eval mode too."""

    cached = True

    def forward(self, ids: Tensor) -> Tensor:
        random.random(), np.random.random(), torch.rand(3)
        self.cached = torch.is_autocast_cache_enabled()
        return super().forward(ids)


@pytest.mark.unchecked  # the checker draws from `random`
def test_random_numbers_go_on_where_they_were() -> None:
    seen = Watch(Noisy(mask=headwise.causal()), IDS, repeats=FEW)
    random.seed(7), np.random.seed(7), torch.manual_seed(7)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    seen.measure(0)
    assert random.getstate() == states[0] and np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert torch.is_autocast_cache_enabled() and not seen.model.cached


# --- what it keeps ----------------------------------------------------------------------------------------------------


def test_a_point_says_what_the_look_says(seen: Look) -> None:
    point = Watch(Planted(), IDS, delimiters=DELIMITERS, repeats=FEW).step(
        3, loss=torch.tensor(1.25, requires_grad=True), lr=math.inf
    )
    assert point is not None and point.step == 3 and point.numbers == {"loss": 1.25}
    for role, [row] in point.scores.items():
        assert row == tuple(round(head.value(role), 4) for head in seen.heads), role
    played = {role: tuple((0, head.head) for head in seen.with_role(role)) for role in point.scores}
    assert point.plays == {role: heads for role, heads in played.items() if heads}
    assert {"self", "induction"} <= {*point.plays}
    assert point.best("induction") == point.scores["induction"][0][7] and point.best("none") is None


def test_a_layer_that_lacks_a_role_and_layers_of_other_sizes(seen: Look) -> None:
    second = (replace(seen.heads[0], layer=1, scores={}), replace(seen.heads[1], layer=1, head=1))
    point = Point.of(0, replace(seen, heads=(*seen.heads, *second), num_layers=2), {})
    assert point.scores["self"][1] == (None, point.scores["self"][0][1]) and len(point.scores["self"][0]) == 8
    late = Point.of(
        0, replace(seen, heads=tuple(replace(head, layer=1) for head in seen.heads[1:]) + seen.heads[:1]), {}
    )
    assert all(late.best(role) == max(h.value(role) or 0 for h in seen.heads) for role in ("self", "induction"))


def test_a_curve_by_role(seen: Look) -> None:
    first = Point.of(0, replace(seen, heads=seen.heads[:2]), {"loss": 3.5})
    curve = Curve("m", {"self": 0.5}, (first, Point.of(7, seen, {"loss": 2.5})))
    assert curve.best("self") == ([0, 7], [first.best("self"), 1.0])
    assert {*curve.formed()} == {*curve.points[1].plays} >= {"self", "induction"} and curve.formed()[0] == "broad"
    rows = [row for row in curve.rows() if row["role"] == "self"]
    assert [(row["step"], row["heads"], row["loss"]) for row in rows] == [(0, 0, 3.5), (7, 1, 2.5)]
    assert Curve.from_dict(json.loads(curve.to_json())) == curve
    with pytest.raises(ValueError, match="measured were self; got 'sink'"):
        curve.best("sink")


def test_a_curve_as_a_figure(seen: Look, tmp_path: Path) -> None:
    looks = {0: replace(seen, heads=seen.heads[:2]), 5: seen, 11: seen}
    points = tuple(Point.of(step, one, {"loss": 1 / (step + 1)}) for step, one in looks.items())
    curve = Curve("m", {"induction": 0.4}, points)
    figure = curve.plot_formation()
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert curve.formed() == [line for line in lines if not line.startswith("_")]
    for name in curve.formed():
        assert (lines[name].get_xdata().tolist(), lines[name].get_ydata().tolist()) == curve.best(name), name
    assert figure.axes[1].lines[0].get_ydata() == pytest.approx([1, 1 / 6, 1 / 12])
    assert len(look.plot_formation(curve, ["induction"]).axes[0].lines) == 2  # and its threshold's
    assert look.write(curve, tmp_path / "c.svg") and look.write(curve, tmp_path / "c.csv")
    assert len(Curve("empty").plot_formation().axes) == 1


# --- when it measures -------------------------------------------------------------------------------------------------


def test_every_so_many_steps(clock: Clock) -> None:
    seen = Watch(Planted(), IDS, every=5)
    assert [step for step in range(12) if seen.step(step)] == [0, 5, 10]
    assert seen.step() is None and seen.last == 12, "the next number by default"
    assert seen.measure() is not None and seen.curve.points[-1].step == 13


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_measurements_take_no_more_than_their_share(share: float, clock: Clock) -> None:
    seen = Watch(Planted(), IDS, share=share)
    times = []
    for step in range(1000):
        if seen.step(step):
            times.append(step)
        clock.now += 0.37 if step < 500 else 0.11  # updates may become shorter
        trained = 0.37 * min(step + 1, 500) + 0.11 * max(step - 499, 0)
        assert seen.spent <= max(1.0, share * trained), step
    assert times[0] == 0
    assert len(times) == math.floor(share * (0.37 * 500 + 0.11 * 499)), "nor less often than they may"


def test_a_measurement_that_was_held_up_does_not_end_the_others(clock: Clock) -> None:
    seen, times = Watch(Planted(), IDS, share=0.1), list[int]()
    for step in range(100):
        clock.takes = 3600.0 if len(times) == 4 else 1.0  # the machine slept
        if seen.step(step):
            times.append(step)
        clock.now += 1.0
    assert times == [0, *range(20, 100, 10)] and seen.spent == 8 + 3600


def test_a_fault_in_the_midst_is_a_warning(clock: Clock, tmp_path: Path) -> None:
    seen = Watch(Planted(), IDS, every=1, path=tmp_path / "c.jsonl")
    assert seen.step(0)
    clock.fault = ValueError("layer 0 has scores that are NaN")
    with pytest.warns(RuntimeWarning, match="^no measurement of heads at step 1: layer 0 has scores that are NaN$"):
        assert seen.step(1) is None
    clock.fault = None
    assert seen.step(2) and [point.step for point in read_curve(tmp_path / "c.jsonl").points] == [0, 2]


def test_a_fault_at_the_first_is_raised() -> None:
    with pytest.raises(ValueError, match="ids"):
        Watch(Planted(), [VOCABULARY + 3]).step(0)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_grows_by_a_line(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    seen = Watch(Planted(), IDS, every=1, path=path)
    sizes = []
    for step in range(3):
        seen.step(step, loss=0.5)
        sizes.append(path.stat().st_size)
        assert read_curve(path) == seen.curve and len(seen.curve.points) == step + 1
    assert len(path.read_bytes().splitlines()) == 4 and sizes[2] - sizes[1] == sizes[1] - sizes[0]
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_goes_on_with_its_file(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    first = Watch(Planted(), IDS, every=1, path=path)
    for step in range(6):
        first.step(step)
    with open(path, "ab") as file:
        file.write(b'{"step":6,"seco')  # killed as it wrote
    assert [point.step for point in read_curve(path).points] == [*range(6)]
    again = Watch(Planted(), IDS, every=1, path=path)
    assert [point.step for point in again.curve.points] == [*range(6)]
    again.step(6)
    assert [point.step for point in read_curve(path).points] == [*range(7)]
    again.step(4)  # from a checkpoint at step 4
    assert [point.step for point in read_curve(path).points] == [0, 1, 2, 3, 4]
    again.step(5)
    assert [point.step for point in read_curve(path).points] == [0, 1, 2, 3, 4, 5]


def test_a_full_disk_leaves_whole_lines(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.jsonl"
    seen = Watch(Planted(), IDS, every=1, path=path)
    seen.step(0)
    seen.step(1)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patched.setattr(os, "fsync", full)
        assert seen.step(2) is None
    assert "No space left on device; free some space" in str(caught[0].message)
    assert path.read_bytes() == before and len(seen.curve.points) == 2
    assert seen.step(3) and len(read_curve(path).points) == 3


@pytest.mark.unchecked
def test_what_is_no_curve_is_told(tmp_path: Path) -> None:
    for name, content in (("a", b"{\n"), ("b", b"[1]\n"), ("c", b'{"format":9}\n'), ("d", b"\xff\n"), ("e", b"[]")):
        (tmp_path / name).write_bytes(content)
        for function in (read_curve, lambda path: Watch(Planted(), IDS, path=path)):
            with pytest.raises(ValueError, match=rf"/{name} is no curve: .*; give what headwise.look.Watch wrote$"):
                function(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"cannot read .*/none: No such file"):
        read_curve(tmp_path / "none")


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": 3}, TypeError, "a watch needs a torch.nn.Module, got int; load the model first"),
        ({"every": 0}, ValueError, "every is at least 1"),
        ({"share": 0}, ValueError, "share is a part of the training time, above 0 and at most 1; got 0"),
        ({"share": "2 %"}, ValueError, "share is a part of the training time"),
        ({"path": "none/c.jsonl"}, FileNotFoundError, "its folder does not exist"),
        ({"tensorboard": 3}, TypeError, "tensorboard is a SummaryWriter, or a folder for one; got 3"),
    ],
)
def test_arguments_of_another_kind(
    arguments: dict[str, Any], error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        Watch(**{"model": Planted(), "ids": IDS, **arguments})
    with pytest.raises(TypeError, match="loss is a number beside the scores, such as a loss; got 'low'"):
        Watch(Planted(), IDS).step(0, loss="low")


# --- TensorBoard, and transformers ------------------------------------------------------------------------------------


class Board:
    """Where scalars go."""

    def __init__(self, folder: str = "") -> None:
        self.folder, self.scalars, self.closed = folder, {}, 0

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars[tag, global_step] = scalar_value

    def close(self) -> None:
        self.closed += 1


def test_scores_go_to_tensorboard(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board()
    with Watch(Planted(), IDS, every=3, tensorboard=board) as seen:
        seen.step(0)
        seen.step(3)
    assert board.scalars["heads/induction/best", 3] == seen.curve.points[1].best("induction")
    assert board.scalars["heads/induction/number", 3] == 1 and not board.closed, "the user's own stays open"
    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = Board  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with Watch(Planted(), IDS, tensorboard="runs") as seen:
        made = seen.writer
        assert isinstance(made, Board) and made.folder == "runs"
    assert made.closed == 1
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    needs = "^a watch that writes for TensorBoard needs tensorboard, which is not installed; pip install tensorboard$"
    with pytest.raises(ImportError, match=needs):
        Watch(Planted(), IDS, tensorboard="runs")


@pytest.mark.unchecked
def test_the_trainer_of_transformers_calls_the_watch(clock: Clock) -> None:
    from transformers import TrainerControl, TrainerState
    from transformers.trainer_callback import CallbackHandler

    seen = Watch(model := Planted(), IDS, every=2, tensorboard=Board())
    handler = CallbackHandler([hf.WatchCallback(seen)], model, None, None, None)
    state, control = TrainerState(is_world_process_zero=True), TrainerControl()
    handler.on_train_begin(None, state, control)
    for step in range(1, 6):  # in the trainer's order: a step's loss is logged after its end
        handler.on_step_begin(None, state, control)
        state.global_step = step
        handler.on_step_end(None, state, control)
        handler.on_log(None, state, control, {"loss": 10.0 - step, "epoch": "?", "learning_rate": None})
        if step == 3:  # an evaluation logs its own loss, after that of the step
            handler.on_log(None, state, control, {"eval_loss": 0.75, "eval_runtime": 3.0})
    handler.on_train_end(None, state, control)
    points = [(point.step, dict(point.numbers)) for point in seen.curve.points]
    last = {"eval_loss": 0.75}
    assert points == [(0, {}), (2, {"loss": 8.0}), (4, {"loss": 6.0} | last), (5, {"loss": 5.0} | last)]
    other = TrainerState(is_world_process_zero=False)
    handler.on_step_begin(None, other, control)
    handler.on_train_end(None, other, control)
    assert len(seen.curve.points) == 4, "the other processes leave it to the first"
    with pytest.raises(TypeError, match=r"a callback takes a headwise\.look\.Watch; got int"):
        hf.WatchCallback(3)

"""Wrappers are seen through, by what they are made of: stand-ins have the shape of the real ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from wrappers import Adapted

import headwise
from headwise.nn import Probe, probe, unwrap

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's compiler


class Beside(nn.Module):
    """No wrapper: its `module` is one part of it."""

    def __init__(self, *more: Any) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        for at, part in enumerate(more):
            setattr(self, f"more{at}", part)


def test_wrappers_are_seen_through_in_any_depth() -> None:
    inner = nn.Linear(2, 3)
    compiled = torch.compile(inner, backend="eager")
    for wrapped in (nn.DataParallel(inner), compiled, Adapted(inner), nn.DataParallel(torch.compile(Adapted(inner)))):
        assert unwrap(wrapped) is inner


def test_what_is_no_wrapper_stays_whole() -> None:
    for whole in (
        Beside(nn.Linear(2, 2)),
        Beside(nn.Parameter(torch.ones(2))),
        nn.Sequential(nn.Linear(2, 2)),
        3,
        None,
    ):
        assert unwrap(whole) is whole
    assert unwrap(nn.Module()).training


@pytest.mark.unchecked
def test_a_learned_prompt_is_refused() -> None:
    text = "Adapted puts a learned prompt before the text, which is no part of the model inside; call get_base_model()"
    with pytest.raises(ValueError, match=re.escape(text)):
        unwrap(Adapted(nn.Linear(2, 3), learns_a_prompt=True))


class Foreign(nn.Module):
    """A kind of model for which another room has a probe."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@contextmanager
def probe_foreign(model: Foreign, each: Any = None) -> Iterator[Probe]:
    seen = Probe(())
    with_hook = model.register_forward_hook(lambda module, args, out: seen.record("", query=out, key=out))
    yield seen
    with_hook.remove()


def test_the_probe_of_another_room_gets_what_is_wrapped() -> None:
    probe.register(Foreign, probe_foreign)
    foreign = Foreign()
    for wrapped in (nn.DataParallel(foreign), Adapted(foreign), torch.compile(foreign, backend="eager"), foreign):
        with probe(wrapped) as seen:
            wrapped(torch.ones(1))
        assert len(seen.calls) == 1


def test_in_ones_own_model_names_are_those_of_what_was_given() -> None:
    wrapped = nn.DataParallel(nn.Sequential(headwise.MultiHeadAttention(12, 3)))
    with probe(wrapped) as seen:
        wrapped(torch.randn(2, 5, 12))
    assert [call.module for call in seen.calls] == ["module.0"]

"""The speed of a proof: how often each model runs, and that a slow one is measured all the same."""

from __future__ import annotations

from collections import Counter

import pytest

from headwise.hf.loading import verify_process as proving


@pytest.mark.parametrize(("enough", "runs"), [(-1.0, 2), (1e9, 6)], ids=["a slow model", "a fast model"])
def test_each_model_warms_up_and_is_measured_at_least_once(
    enough: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proving, "ENOUGH", enough)
    ran: Counter[str] = Counter()
    taken = proving._times(["one", "other"], lambda model: model * 2, lambda model, ready: ran.update([model, ready]))
    assert ran == {name: runs for model in ("one", "other") for name in (model, model * 2)}
    assert len(taken) == 2 and all(isinstance(one, float) for one in taken)

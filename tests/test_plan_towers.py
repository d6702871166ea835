"""Models that take pictures or sound: every tower counted by its own part of the config, equal to transformers'."""

from __future__ import annotations

import random

import pytest
from plan_models import COMPOSITE, composite_config, composite_model, random_composite

from headwise.plan.model import model_of

pytestmark = pytest.mark.unchecked


@pytest.mark.parametrize("name", COMPOSITE)
def test_parameters_of_all_towers_are_those_of_the_model(name: str) -> None:
    for seed in range(2):
        fields = random_composite(name, random.Random(seed))
        real = composite_model(name, composite_config(name, fields))
        ours = model_of({**fields, "model_type": name})
        assert ours.total_parameters() == sum(p.numel() for p in real.parameters()), (seed, fields)
        assert ours.towers and all(tower.parameter_count() > 0 for tower in ours.towers)

"""transformers models whose sequences are split over ranks: loss, logits and gradients are those of one process."""

import draw
import pytest
import ranks
from context_models import BATCHES, MODELS, train_all


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_split_model_trains_as_in_one_process(name: str) -> None:
    for errors in ranks.pool(2).run(train_all, name, draw.drawn(BATCHES, name)):
        for case, (error, part) in errors.items():
            assert error <= 3e-5, (case, part, error)

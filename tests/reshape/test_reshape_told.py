"""What a report tells of a checkpoint stands in the facts, number by number; and what a proof allows."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headwise.reshape.layout.head_axes import Sizes
from headwise.reshape.write.readme import rows
from headwise.reshape.write.verify import require


@pytest.mark.parametrize("stage", ["pruned", "regrouped"])
def test_rows_hold_the_numbers_before_and_after(stage: str) -> None:
    facts: dict[str, Any] = {
        "model_type": ["gpt2", "llama"],
        "counts": {"num_attention_heads": [7, 5]},
        "weight_bytes": [11 << 20, 3 << 20],
        "losses": {"original": 2.0, stage: 3.0, "recovered": 2.5, "tokens": 53},
        "context": 97,
        "plan": [{"parameters": 1_300, "cache_bytes": 2 << 20}, {"parameters": 1_100, "cache_bytes": 1 << 20}],
        "proof": {"parameters": [1301, 1103], "loss": [1.0, 2.0], "tokens": 31, "cache_bytes": [5 << 20, 4 << 20]},
    }
    told = {name: (before, after) for name, before, after in rows(facts)}
    what = "loss on 53 tokens that nothing was fitted to (nats/token)"
    assert told[f"{what}: before recovery"] == ("2.0000", "3.0000")
    assert told[f"{what}: recovered"] == ("2.0000", "2.5000")
    assert told["model_type"] == ("gpt2", "llama") and told["num_attention_heads"] == ("7", "5")
    assert told["parameters"] == ("1,301", "1,103") and told["loss (nats/token)"] == ("1.0000", "2.0000")
    assert told["perplexity"] == (f"{math.e:.4g}", f"{math.e**2:.4g}")
    for name, before, after in (
        ("weights", 11, 3),
        ("cache of 97 tokens in float32, planned", 2, 1),
        ("cache of 31 tokens in float32", 5, 4),
    ):
        assert [float(text.removesuffix(" MiB")) for text in told[name]] == [before, after], name


def test_a_difference_is_allowed_up_to_its_share_of_the_largest_output() -> None:
    """1e-5 of the largest output, of outputs below 1 that of 1; and not a bit more."""
    for largest in (0.3, 1.0, 7.0):
        allowed = 1e-5 * max(1.0, largest)
        answer = {"missing": [], "unexpected": [], "class": "A", "largest": largest}
        require({**answer, "difference": allowed})
        for wrong in (math.nextafter(allowed, 1), math.nan):
            with pytest.raises(ValueError, match="the result differs from the original"):
                require({**answer, "difference": wrong})


def test_parts_of_a_head_have_the_sizes_of_keys_values_and_latents() -> None:
    sizes = Sizes(H=6, K=3, D=11, V=5, rope_dim=4)
    assert [sizes.of(part) for part in ("", "q", "k", "v", "o", "n")] == [1, 11, 11, 5, 5, 7] and sizes.group == 2

"""transformers' continuous batching on headwise's attention: the tokens and log-probabilities of sdpa's."""

from __future__ import annotations

import gc
import logging
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hf_models import BY_NAME, OUTSIDE, PAD, VOCAB, Row, padding, token_ids
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator

import headwise.hf
from headwise.hf import ModelError
from headwise.hf.decode.continuous_batching import NAME


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stop of transformers' manager collects all garbage of the process, and each start warns of no psutil."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)


@dataclass(frozen=True)
class Schedule:
    """Requests (prompt, tokens to make), of which the later join when the first has left; and the room they have."""

    requests: tuple[tuple[list[int], int], ...]
    at_first: int
    room: dict[str, int]


def drawn(seed: int, page: int) -> Schedule:
    """Prompts of one token to more than a page; some begin alike, and share pages; all in pieces of few tokens."""
    draw = random.Random(seed)
    beginning = draw.choices(range(2, VOCAB), k=page + draw.randrange(1, 9))
    requests = []
    for n in range(draw.randrange(4, 7)):
        prompt = draw.choices(range(2, VOCAB), k=draw.choice([1, 2, 5, 11, 23]))
        requests.append((beginning + prompt if n % 3 == 1 else prompt, draw.randrange(1, 9)))
    budget = draw.choice([7, 19, 64, 256])
    return Schedule(tuple(requests), draw.randrange(1, 4), dict(page_size=page, num_blocks=40, max_batch_tokens=budget))


def served(model: PreTrainedModel, plan: Schedule) -> tuple[list[list[int]], list[list[float]]]:
    """The tokens of each request, and their log-probabilities."""
    how = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=PAD)
    room = ContinuousBatchingConfig(**plan.room, return_logprobs=True, auto_switch_to_flash=False)
    done: dict[str, Any] = {}
    with model.continuous_batching_context_manager(
        generation_config=how, continuous_batching_config=room, warmup=False
    ) as manager:

        def add(start: int, stop: int) -> list[str]:
            return [manager.add_request(prompt, max_new_tokens=n) for prompt, n in plan.requests[start:stop]]

        names = add(0, plan.at_first)
        while len(done) < len(plan.requests):
            result = manager.get_result(timeout=60)  # a machine may be busy
            assert result is not None and result.error is None, result and result.error
            done[result.request_id] = result
            if len(names) < len(plan.requests):
                names += add(plan.at_first, len(plan.requests))
    return [done[name].generated_tokens for name in names], [done[name].logprobs for name in names]


def greedy(model: PreTrainedModel, plan: Schedule) -> list[list[int]]:
    """The same, one request after another, with eager attention and no cache shared."""
    how: dict[str, Any] = dict(do_sample=False, pad_token_id=PAD)
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=n, min_new_tokens=n, **how)[0, len(prompt) :].tolist()
        for prompt, n in plan.requests
    ]


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each gathering of a whole cache has moved, in layers without a window."""
    seen: list[int] = []
    real = FullAttentionCacheAllocator.update

    def spy(self: Any, key: Tensor, value: Tensor, layer: int, read: Tensor, write: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(read.numel())
        return real(self, key, value, layer, read, write)

    monkeypatch.setattr(FullAttentionCacheAllocator, "update", spy)
    return seen


@pytest.mark.parametrize(
    ("row", "seed", "page"),
    [
        ("Llama GQA", 1, 128),
        ("Llama GQA", 2, 16),
        ("Llama MHA", 3, 256),
        ("Mistral window", 4, 16),
        ("Mistral window", 5, 128),
        ("Qwen2", 6, 128),
        ("Gemma3 text", 7, 16),
        ("Gemma3 text", 8, 128),
    ],
)
def test_tokens_are_those_of_sdpa(row: str, seed: int, page: int, gathers: list[int]) -> None:
    model, plan = BY_NAME[row].build(), drawn(seed, page)
    model.set_attn_implementation("sdpa")
    tokens, logits = served(model, plan)
    gathers.clear()
    with headwise.hf.serving(model) as ours:
        assert ours is model
        output, scores = served(model, plan)
    assert output == tokens
    for a, b in zip(scores, logits, strict=True):
        # Of float32 logits of about 10, with sums rounded in another order; the largest of 120 schedules was 2e-6.
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=0, atol=2e-5)
    assert (max(gathers, default=0) > 0) is (page == 16 and row != "Mistral window"), "pages of 128 are read in place"


@pytest.mark.parametrize(("row", "seed", "page"), [("Gemma2 softcap", 9, 128), ("gpt-oss sinks", 10, 16)])
def test_softcaps_and_sinks_are_honoured(row: str, seed: int, page: int) -> None:
    """sdpa has neither; the truth is eager, one request at a time."""
    model, plan = BY_NAME[row].build(), drawn(seed, page)
    truth = greedy(model, plan)
    with headwise.hf.serving(model):
        assert served(model, plan)[0] == truth


def test_other_models_and_other_calls_are_left_alone() -> None:
    model, other = BY_NAME["Qwen2"].build(), BY_NAME["Llama GQA"].build()
    model.set_attn_implementation("sdpa")
    arguments = {"input_ids": token_ids(), "attention_mask": padding("left")}
    seen = arguments["attention_mask"].bool()
    with torch.no_grad():
        before = model(**arguments).logits[seen]
        with pytest.raises(KeyError, match="stop"), headwise.hf.serving(model):
            assert {part.config._attn_implementation for part in (model, model.model)} == {NAME}
            assert other.config._attn_implementation == "eager"
            inside = model(**arguments).logits[seen]
            raise KeyError("stop")
        assert model.config._attn_implementation == "sdpa"
        torch.testing.assert_close(inside, before, rtol=1e-4, atol=1e-4)  # padded, with a window, without a cache
        assert torch.equal(model(**arguments).logits[seen], before)


def test_a_manager_kept_for_later_does_not_outlive_the_block() -> None:
    """It has room for no mask, which sdpa would then miss."""
    model, plan = BY_NAME["Llama GQA"].build(), drawn(1, 16)
    model.set_attn_implementation("sdpa")
    room = ContinuousBatchingConfig(**plan.room)
    how = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=2)
    options: dict[str, Any] = dict(generation_config=how, continuous_batching_config=room)
    with headwise.hf.serving(model):
        model.generate_batch([[2, 3]], persistent_manager=True, warmup=False, **options)
        kept = model.init_continuous_batching(**options)
    assert model.init_continuous_batching(**options) is not kept


def error_of(model: Any) -> str:
    with pytest.raises((ModelError, TypeError, ValueError)) as raised, headwise.hf.serving(model):
        raise AssertionError("served")
    return str(raised.value)


@pytest.mark.unchecked
def test_what_cannot_be_served_is_refused_in_one_line() -> None:
    gpt = OUTSIDE["openai-gpt"]
    cases: list[tuple[Any, str]] = [
        (torch.nn.Linear(2, 3), "takes a transformers PreTrainedModel; got Linear"),
        (BY_NAME["BERT"].build(), r"(model_type 'bert') has no continuous batching in transformers"),
        (BY_NAME["T5"].build(), "load it with AutoModelForCausalLM, or call generate()"),
        (Row("GPT", gpt[0], gpt[1], 0, sizes=gpt[2]).build(), "is not on transformers' attention interface"),
        (BY_NAME["Llama GQA"].build().to("meta"), "is on meta; headwise.hf.serving is for the CPU"),
    ]
    for model, words in cases:
        said = error_of(model)
        assert words in said and "\n" not in said, said


def test_a_mask_of_the_models_own_making_is_refused() -> None:
    """Doge picks the keys of each query by a mask that it computes; without it the tokens would be others."""
    model, plan = BY_NAME["Doge"].build(), drawn(1, 16)
    with headwise.hf.serving(model), pytest.raises(AssertionError, match="DogeAttention computes a mask of its own"):
        served(model, plan)


def test_keys_that_do_not_fit_in_the_pages_are_told() -> None:
    """With any attention, requests to latent attention fail; what they tell is a fault of an index_copy_."""
    model, plan = BY_NAME["DeepSeek-V3"].build(), drawn(1, 16)
    text = r"DeepseekV3Attention passes key \(1, 4, \d+, 10\) and value .* pages hold 4 heads of 4, .* latent attention"
    with headwise.hf.serving(model), pytest.raises(AssertionError, match=text):
        served(model, plan)

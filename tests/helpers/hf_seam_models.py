"""Tiny random models whose attention is in code of their own, and what transformers' own attention makes of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from hf_models import PAD, VOCAB, stir, token_ids
from hf_models import padding as padding_of
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.hf.models.architectures import CACHE

IDS: dict[str, Any] = dict(vocab_size=VOCAB, pad_token_id=PAD, bos_token_id=1, eos_token_id=None)
BERT: dict[str, Any] = dict(
    hidden_size=35, num_hidden_layers=2, num_attention_heads=5, intermediate_size=17, max_position_embeddings=61
)
FALCON: dict[str, Any] = dict(hidden_size=40, num_hidden_layers=2, num_attention_heads=5)
GPT: dict[str, Any] = dict(n_positions=61, n_embd=35, n_layer=2, n_head=5)
DEBERTA: dict[str, Any] = BERT | dict(relative_attention=True, position_biased_input=False)


@dataclass(frozen=True, eq=False)
class SeamRow:
    """A model: its class and sizes in transformers; `truth`, the attention of transformers that is right."""

    name: str
    model: str
    config: str
    sizes: dict[str, Any]
    kind: str = "decoder"
    truth: str = "eager"
    heads: int = 5

    def config_of(self) -> Any:
        return getattr(transformers, self.config)(**{**IDS, **copy.deepcopy(self.sizes)})

    def build(self, implementation: str | None = None) -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            cls = getattr(transformers, self.model)
            model = cls._from_config(self.config_of(), attn_implementation=implementation or self.truth).eval()
            stir(model)
        return model


ROWS = (
    SeamRow(
        "GPT-J", "GPTJForCausalLM", "GPTJConfig", dict(n_embd=35, n_layer=2, n_head=5, rotary_dim=2, n_positions=61)
    ),
    SeamRow(
        "CodeGen",
        "CodeGenForCausalLM",
        "CodeGenConfig",
        dict(n_embd=28, n_layer=2, n_head=4, rotary_dim=4, n_positions=61, n_ctx=61),
        heads=4,
    ),
    SeamRow(
        "GPT-Neo",
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        dict(
            hidden_size=35,
            num_layers=2,
            num_heads=5,
            attention_types=[[["global", "local"], 1]],
            window_size=3,
            max_position_embeddings=61,
        ),
    ),
    SeamRow("Bloom", "BloomForCausalLM", "BloomConfig", dict(hidden_size=35, n_layer=2, n_head=5)),
    SeamRow("MPT", "MptForCausalLM", "MptConfig", dict(d_model=35, n_heads=5, n_layers=2, max_seq_len=61)),
    SeamRow("Falcon MQA", "FalconForCausalLM", "FalconConfig", FALCON | dict(multi_query=True)),
    SeamRow("Falcon MHA", "FalconForCausalLM", "FalconConfig", FALCON | dict(multi_query=False)),
    SeamRow(
        "Falcon GQA",
        "FalconForCausalLM",
        "FalconConfig",
        FALCON | dict(hidden_size=48, num_attention_heads=6, num_kv_heads=2, new_decoder_architecture=True),
        heads=6,
    ),
    # eager adds the bias twice: see docs/huggingface.md
    SeamRow(
        "Falcon ALiBi", "FalconForCausalLM", "FalconConfig", FALCON | dict(multi_query=False, alibi=True), truth="sdpa"
    ),
    SeamRow("MPNet", "MPNetForMaskedLM", "MPNetConfig", BERT, "encoder"),
    SeamRow(
        "DeBERTa-v3",
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        DEBERTA | dict(position_buckets=4, norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type=["p2c", "c2p"]),
        "encoder",
    ),
    SeamRow(
        "DeBERTa-v2",
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        DEBERTA | dict(max_relative_positions=7, pos_att_type=["c2p", "p2c"], conv_kernel_size=3),
        "encoder",
    ),
    SeamRow(
        "DeBERTa-v2 c2p",
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        DEBERTA | dict(max_relative_positions=7, pos_att_type=["c2p"]),
        "encoder",
    ),
    SeamRow("DeBERTa-v2 absolute", "DebertaV2ForMaskedLM", "DebertaV2Config", BERT, "encoder"),
)
BY_NAME = {row.name: row for row in ROWS}
DECODERS = tuple(row for row in ROWS if row.kind == "decoder")


@cache
def truth_of(row: SeamRow) -> PreTrainedModel:
    """The model on transformers' attention; never switched."""
    return row.build()


@cache
def model_of(row: SeamRow) -> PreTrainedModel:
    """The same weights, built with the name."""
    model = row.build("headwise")
    model.load_state_dict(truth_of(row).state_dict())
    return model


@cache
def exact_of(row: SeamRow) -> PreTrainedModel:
    """In float64."""
    return copy.deepcopy(truth_of(row)).double()


def arguments(side: str) -> dict[str, Tensor]:
    """Ids and padding, `side` as in `hf_models.padding`."""
    real = padding_of(side)
    return dict(input_ids=torch.where(real.bool(), token_ids(), PAD), attention_mask=real)


def names(rows: tuple[SeamRow, ...]) -> Any:
    """A test for each of the rows."""
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


def run(model: nn.Module, side: str = "left", **more: Any) -> Any:
    """What the model makes of the padded text."""
    with torch.no_grad():
        return model(**arguments(side), **more)


def fed(model: PreTrainedModel, cache: Any, side: str = "left", plan: tuple[int, ...] = (5, 1, 3, 1, 1)) -> Tensor:
    """Logits of the real tokens of a text fed in pieces through a cache."""
    ids, real = token_ids(sum(plan), seed=13), padding_of(side, sum(plan))
    positions, logits, at = (real.cumsum(-1) - 1).clamp(min=0), [], 0
    with torch.no_grad():
        for length in plan:
            piece = slice(at, at + length)
            inputs: dict[str, Any] = dict(input_ids=ids[:, piece], attention_mask=real[:, : piece.stop])
            if "position_ids" in model.forward.__code__.co_varnames:
                inputs["position_ids"] = positions[:, piece]
            logits.append(model(**inputs, **{CACHE: cache}, use_cache=True).logits)
            at += length
    return torch.cat(logits, 1)[real.bool()]

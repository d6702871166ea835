"""`headwise.look.at` on transformers models: against the matrices that their own eager attention reports."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hf_models import BY_NAME, VOCAB
from planted import check_against
from torch import Tensor, nn

import headwise.hf
from headwise import look, models
from headwise.look import HeadRecord, Look
from headwise.look.inputs.repeated_tokens import draw, targets

pytestmark = pytest.mark.unchecked  # the models are transformers' own, and the checker slows them down
TOLERANCE = 1e-4
KINDS = {
    "GPT-2": "decoder", "Llama GQA": "decoder", "Mistral window": "decoder", "Gemma2 softcap": "decoder",
    "gpt-oss sinks": "decoder", "DeepSeek-V3": "decoder", "BERT": "encoder", "ALBERT": "encoder",
    "T5": "encoder-decoder", "BART": "encoder-decoder",
}  # fmt: skip


def eager(model: Any, **arguments: Tensor) -> list[Tensor]:
    """The float64 matrices (B, H, T, S) of a forward, in the order of the calls."""
    with torch.no_grad():
        out = model(**arguments, output_attentions=True)
    if "decoder_attentions" not in out:
        return [p.double() for p in out.attentions]
    beside = itertools.chain(*zip(out.decoder_attentions, out.cross_attentions, strict=True))
    return [p.double() for p in (*out.encoder_attentions, *beside)]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model(name: str) -> None:
    model = BY_NAME[name].build()
    ids = torch.randint(4, VOCAB, (1, 37), generator=torch.Generator().manual_seed(5))
    record = look.at(model, ids, delimiters=[5, 6, 7])
    arguments = {"input_ids": ids}
    if KINDS[name] == "encoder-decoder":
        config = model.config
        start = config.decoder_start_token_id if config.decoder_start_token_id is not None else config.bos_token_id
        arguments["decoder_input_ids"] = torch.cat([torch.tensor([[start]]), ids[:, :-2]], 1)
    matrices = eager(model, **arguments)
    assert record.kind == KINDS[name] and record.num_layers == len(matrices)
    marks = {row.shape[1]: torch.isin(row[0], torch.tensor([5, 6, 7])) for row in arguments.values()}
    ps = [matrix[0, h] for matrix in matrices for h in range(matrix.shape[1])]
    for head, p in zip(record.heads, ps, strict=True):
        beyond_the_first = marks[p.shape[-1]] & (torch.arange(p.shape[-1]) > 0)
        check_against(head, p, beyond_the_first, tolerance=TOLERANCE)
    whole = [head for head in record.heads if head.queries == head.keys and "window" not in name]
    assert name in ("Gemma2 softcap", "gpt-oss sinks") or all("duplicate-token" in head.scores for head in whole)
    assert KINDS[name] != "encoder" or not any("induction" in head.scores for head in record.heads)


def test_shared_layers_are_told_apart() -> None:
    record = look.at(BY_NAME["ALBERT"].build(), torch.arange(4, 20))
    assert len({head.module for head in record.heads}) == 1
    assert [head.call for head in record.heads[:: record.num_heads]] == [0, 1, 2]


@pytest.mark.parametrize(("name", "takes"), [("ViT", "'pixel_values'"), ("Whisper", "'input_features'")])
def test_a_model_without_text_is_refused(name: str, takes: str) -> None:
    with pytest.raises(ValueError, match=f"ids are a text, and .* takes {takes}; give look.at what its processor"):
        look.at(BY_NAME[name].build(), [1, 2, 3])


def test_a_model_of_images_and_text_is_refused() -> None:
    with pytest.raises(ValueError, match="CLIPModel takes image and text, and does not run on ids alone"):
        look.at(BY_NAME["CLIP"].build(), [1, 2, 3])


def test_a_tensor_parallel_share_is_refused() -> None:
    """What colwise and rowwise plans leave in each of two processes, as plain tensors."""
    model = BY_NAME["Llama GQA"].build()
    for layer in model.model.layers:
        for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            part.weight = nn.Parameter(part.weight[: len(part.weight) // 2].detach())
        out = layer.self_attn.o_proj
        out.weight = nn.Parameter(out.weight[:, : out.weight.shape[1] // 2].detach())
    with pytest.raises(ValueError, match=r"'model.layers.0.self_attn' ran 2 query heads and has 4: the model is split"):
        look.at(model, [1, 2, 3])


def test_a_wrapped_model_is_looked_at_as_what_it_wraps() -> None:
    model = BY_NAME["Llama GQA"].build()
    bare = look.at(model, [1, 2, 3], repeats=None)
    wrapped = look.at(nn.DataParallel(model), [1, 2, 3], repeats=None)
    assert wrapped.heads == bare.heads and wrapped.model == bare.model


# --- the model in the package ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded() -> headwise.hf.Loaded:
    return headwise.hf.load(models.tiny_path())


@pytest.fixture(scope="module")
def ids(loaded: headwise.hf.Loaded) -> list[int]:
    return list(loaded.tokenizer.encode(models.default_text()))


@pytest.fixture(scope="module")
def tiny(loaded: headwise.hf.Loaded, ids: list[int]) -> Look:
    return look.at(loaded.model, ids, tokens=loaded.tokenizer.convert_ids_to_tokens(ids), delimiters=loaded.delimiters)


def best(tiny: Look, role: str) -> HeadRecord:
    heads = tiny.with_role(role)
    assert heads, f"no head of the packaged model plays {role!r}"
    return heads[0]


def test_the_packaged_model_has_learned(tiny: Look) -> None:
    assert best(tiny, "previous-token").offsets[1] > 0.5
    assert best(tiny, "induction").scores["induction"].value > 0.4
    assert best(tiny, "first-token sink").scores["first-token sink"].value > 0.3
    assert best(tiny, "previous-token").layer < best(tiny, "induction").layer  # induction needs one below it


def test_the_packaged_model_against_eager(loaded: headwise.hf.Loaded, ids: list[int], tiny: Look) -> None:
    marks = torch.isin(torch.tensor(ids), torch.tensor(loaded.delimiters))
    marks[0] = False
    loaded.model.set_attn_implementation("eager")
    matrices = eager(loaded.model, input_ids=torch.tensor([ids]))
    for head, p in zip(tiny.heads, [matrix[0, h] for matrix in matrices for h in range(8)], strict=True):
        check_against(head, p, marks, tolerance=TOLERANCE)


def test_copies_on_the_packaged_model_against_eager(loaded: headwise.hf.Loaded, tiny: Look) -> None:
    avoided = {0, 1, *loaded.delimiters}
    drawn = draw(look.Repeats(), [i for i in range(2048) if i not in avoided], 72, before=[0])
    loaded.model.set_attn_implementation("eager")
    matrices = eager(loaded.model, input_ids=torch.tensor([sequence.ids for sequence in drawn]))
    for role, name in (("duplicate-token", "duplicate"), ("induction", "induction")):
        lists = [targets(sequence, ahead=False)[name] for sequence in drawn]
        for head in tiny.heads:
            p = matrices[head.layer][:, head.head]
            rows = [p[b, i, keys].sum() for b, one in enumerate(lists) for i, keys in enumerate(one) if keys]
            assert head.value(role) == pytest.approx(float(torch.stack(rows).mean()), abs=TOLERANCE)

"""Looks at pictures, sound, pairs and a decoder's own text: roles by construction, numbers by definition."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor, nn

import headwise
import headwise.hf
from headwise import look
from headwise.look.records import axes
from headwise.look.records import images as pictures
from headwise.look.roles.catalog import ROLES
from headwise.nn import Head, MultiHeadAttention
from headwise.testing.constructed import Tables, constructed, constructed_pair
from headwise.testing.pictures import JOBS, constructed_picture, picture_targets

SMALL = dict(hidden_size=24, num_attention_heads=3, intermediate_size=8)
VISION = SMALL | dict(num_hidden_layers=2, image_size=20, patch_size=4)
TEXT = SMALL | dict(num_hidden_layers=1, num_key_value_heads=1, vocab_size=97)
IMAGE = 96
OVER = {role.name: role.over for role in ROLES}


def pixels(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*(shape or (1, 3, 20, 20)), generator=torch.Generator().manual_seed(seed))


def vision_language() -> Any:
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=IMAGE,
    )
    return transformers.LlavaForConditionalGeneration(config)


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_each_job_on_a_picture_has_its_name_and_no_other() -> None:
    named = [job for job in JOBS if job != "alike"]
    for grid, registers in (((5, 7), 3), ((11, 6), 1)):
        model, jobs = constructed_picture([named[:6], named[6:]], grid, registers=registers)
        seen = look.at(model, {"pixel_values": model.sample()})
        for head in seen.heads:
            job = jobs[head.layer, head.head]
            assert [score.name for score in head.roles] == [job], (job, head.roles)
            own = registers + 1  # [CLS] and registers attend all places alike
            most = 1 - own / head.queries if job == "self" else 1.0
            value = head.value(job)
            assert value is not None and 0.99 * most <= value <= 1 + 1e-6, (job, value)
    assert seen.kind == "encoder" and seen.tokens == () and seen.length == 68


def test_a_picture_goes_into_a_model_of_another_dtype() -> None:
    model, jobs = constructed_picture([["right neighbour", "same row"]], (5, 7), registers=2)
    picture = model.sample()
    halves = look.at(model.to(torch.bfloat16), {"pixel_values": picture})
    assert picture.dtype == torch.float32 and [head.role for head in halves.heads] == list(jobs.values())


def test_roles_of_text_are_not_measured_on_pictures_nor_those_of_pictures_on_text() -> None:
    model, _ = constructed_picture([["self"]], (5, 7))
    seen = look.at(model, {"pixel_values": model.sample()})
    assert all(axes.PICTURE in OVER[name] for name in seen.heads[0].scores)
    assert "previous-token" not in seen.heads[0].scores and "right neighbour" in seen.heads[0].scores
    text, _ = constructed([["self"]])
    assert all(axes.TEXT in OVER[name] for name in look.at(text, text.sample(29)).heads[0].scores)


def test_random_encoders_play_no_role_of_pictures() -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        model = transformers.ViTModel(transformers.ViTConfig(**VISION))
        for layer in model.parameters():
            layer.data.mul_(1 + 4 * (seed % 3))
        seen = look.at(model, {"pixel_values": pixels(seed=seed)}, full_maps=False)
        played = {score.name for head in seen.heads for score in head.roles}
        assert played <= {"broad"}, (seed, played)


def test_scores_on_a_picture_are_what_the_weights_say() -> None:
    torch.manual_seed(3)
    model = transformers.ViTModel(transformers.ViTConfig(**VISION)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(6)
    read = {"pixel_values": pixels()}
    seen = look.at(model, read)
    with headwise.nn.probe(model) as calls, torch.no_grad():
        model(**read)
    for call in calls.calls:
        A = headwise.weights(call.query, call.key, **call.scoring)[0].double()
        for name in ("left neighbour", "lower neighbour", "same row", "same column", "[CLS] sink"):
            wanted = picture_targets(name, (5, 5), 1)
            rows = wanted.any(-1)
            for h in range(3):
                expected = float((A[h] * wanted).sum(-1)[rows].mean())
                score = seen.head(call.order, h).score(name)
                assert score is not None and score.value == pytest.approx(expected, abs=2e-6), name
                assert score.count == int(rows.sum())


def test_several_pictures_are_several_texts() -> None:
    model, _ = constructed_picture([["right neighbour", "[CLS] sink"]], (5, 7))
    both = torch.cat([model.sample(), model.sample(seed=1)])
    seen = look.at(model, {"pixel_values": both})
    score = seen.heads[0].scores["right neighbour"]
    assert score.count == 60 and score.low is not None and score.plays
    assert len(seen.pictures) == 2 and {one.text for one in score.evidence} <= {0, 1}


def test_calls_of_one_module_a_picture_are_summed() -> None:
    torch.manual_seed(0)
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    config = transformers.Qwen2VLConfig(
        text_config=TEXT | {"rope_parameters": rope, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        vision_config=dict(depth=2, embed_dim=24, hidden_size=24, num_heads=3, patch_size=4, mlp_ratio=2),
        image_token_id=IMAGE,
    )
    model = transformers.Qwen2VLForConditionalGeneration(config)
    ids = [1, *[IMAGE] * 4, 7, *[IMAGE] * 6, 5, 6]
    read = {
        "input_ids": torch.tensor([ids]),
        "pixel_values": pixels(40, 96),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 6]]),
        "mm_token_type_ids": torch.tensor([[int(i == IMAGE) for i in ids]]),
    }
    seen = look.at(model, read)
    assert [(head.module, head.part) for head in seen.heads[::3]] == [
        ("model.visual.blocks.0.attn", "encoder"),
        ("model.visual.blocks.1.attn", "encoder"),
        ("model.language_model.layers.0.self_attn", "decoder"),
    ]
    assert seen.heads[0].scores["right neighbour"].count == 4 * 3 + 4 * 5
    text = seen.axes[seen.heads[-1].over[0]]
    assert text.grids == ((2, 2), (2, 3)) and text.cells[6:8] == ((1, 0, 0), (1, 0, 1)) and text.cells[0] == (-1,) * 3
    assert [(one.width, one.height) for one in seen.pictures] == [(16, 16), (24, 16)]
    assert seen.heads[-1].score("induction") is not None  # of ids alone, none of them a place of a picture


def test_windows_are_refused_by_name() -> None:
    torch.manual_seed(0)
    config = transformers.SwinConfig(image_size=16, patch_size=4, embed_dim=8, depths=[1], num_heads=[2], window_size=2)
    text = (
        "module 'encoder.layers.0.blocks.0.attention' attends within windows: 4 rows of 4 places for 1 picture; look "
        "lays maps over models whose layers attend over the whole picture"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        look.at(transformers.SwinModel(config), {"pixel_values": pixels(1, 3, 16, 16)})


def test_a_text_with_a_picture_in_it() -> None:
    """Roles of text count the queries that are text; those of pictures the patches; the mass is by definition."""
    model = vision_language().eval()
    ids = [1, *[IMAGE] * 25, 5, 6, 7, 8]
    read = {"input_ids": torch.tensor([ids]), "pixel_values": pixels()}
    seen = look.at(model, read, repeats=None)
    assert seen.kind == "encoder and decoder" and seen.axes[-1].kind == axes.MIXED
    head = seen.heads[-1]
    assert "right neighbour" not in head.scores  # which a decoder does not see yet
    assert head.scores["left neighbour"].count == 20 and head.scores["first-token sink"].count == 4
    with headwise.nn.probe(model) as calls, torch.no_grad():
        model(**read)
    call = calls.calls[-1]
    A = headwise.weights(call.query, call.key, **call.scoring)[0].double()
    words = torch.tensor([i != IMAGE for i in ids])
    for h in range(3):
        expected = float(A[h][words][:, ~words].sum(-1).mean())
        assert seen.head(call.order, h).extras["mass on the picture"] == pytest.approx(expected, abs=2e-6)
        previous = float(A[h].diagonal(-1)[words[1:]].mean())
        assert seen.head(call.order, h).value("previous-token") == pytest.approx(previous, abs=2e-6)
    assert len(seen.maps[-1].data) == 30 * 30  # a cell a place


# -- sound, targets, pairs ---------------------------------------------------------------------------------------------


def listener() -> Any:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        d_model=24, encoder_layers=1, decoder_layers=1, encoder_attention_heads=3, decoder_attention_heads=3,
        encoder_ffn_dim=8, decoder_ffn_dim=8, vocab_size=97, num_mel_bins=5, max_source_positions=11,
        decoder_start_token_id=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def test_parts_are_told_by_name_where_lengths_are_equal() -> None:
    sound = {"input_features": pixels(1, 5, 22), "decoder_input_ids": torch.arange(1, 12)[None]}
    seen = look.at(listener(), sound, tokens=[f"t{n}" for n in range(11)])
    assert [head.part for head in seen.heads[::3]] == ["encoder", "decoder", "cross"]
    assert [(seen.axes[a].kind, seen.axes[b].kind) for a, b in (head.over for head in seen.heads[::3])] == [
        ("sound", "sound"), ("text", "text"), ("text", "sound"),
    ]  # fmt: skip
    assert seen.heads[0].queries == seen.heads[3].queries == 11 and seen.tokens[2] == "t2"
    assert "previous-token" in seen.heads[0].scores and set(seen.heads[-1].scores) == {"broad"}
    assert seen.pictures[0].kind == "sound" and look.at(listener(), {"input_features": pixels(1, 5, 22)}).length == 1


def test_a_decoder_reads_a_text_of_its_own() -> None:
    model, _ = constructed_pair([["self"]], [["previous-token"]], [["alignment", "first-token sink"]])
    ids = model.sample(29)
    own = torch.cat([ids[:, :1], model.sample(29, seed=5)[:, :28]], 1)

    class Named(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
            out: Tensor = super().forward(input_ids, decoder_input_ids)
            return out

    model.__class__ = Named
    seen = look.at(model, {"input_ids": ids, "decoder_input_ids": own})
    assert [head.part for head in seen.heads] == ["encoder", "decoder", "cross", "cross"]
    assert seen.heads[1].role == "previous-token" and seen.heads[3].states == ("first-token sink",)
    assert "alignment" not in seen.heads[2].scores  # the decoder does not read the encoder's text
    by_labels = look.at(model, {"input_ids": ids, "labels": own[:, 1:]})
    assert by_labels.axes[1].length == 28 and by_labels.heads[1].queries == 28
    plain = look.at(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert plain.heads == look.at(model, ids).heads and plain.axes == ()
    assert {score.name for score in plain.heads[2].roles} >= {"alignment, next"}


class Pair(nn.Module):
    """Heads that attend the other sentence: of the first from the second, of the second from the first."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        T = self.places = first + second
        kinds = torch.tensor([0] * first + [1] * second)
        heads = []
        for row in (0, 1):
            wanted = (kinds[:, None] == row) & (kinds[None] != row)
            zero = torch.zeros(T, 1)
            heads.append(Head(40 * T**0.5 * wanted.float(), torch.eye(T), zero, zero.T))
        self.attend = MultiHeadAttention.from_heads(heads)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        out: Tensor = self.attend(torch.eye(self.places)[None, : input_ids.shape[1]])
        return out


def test_heads_between_the_sentences_of_a_pair() -> None:
    ids, kinds = torch.arange(3, 20)[None], torch.tensor([[0] * 9 + [1] * 8])
    seen = look.at(Pair(9, 8), {"input_ids": ids, "token_type_ids": kinds}, repeats=None)
    for head, name in zip(seen.heads, ("first to second", "second to first"), strict=True):
        others = [score.name for score in head.roles if score.name != name]
        score = head.scores[name]
        assert score.plays and not {"first to second", "second to first"} & set(others)
        inner = 7 / 8 if name == "first to second" else 8 / 9  # the first and the last token are no words
        assert score.value == pytest.approx(inner, abs=1e-5) and score.null == pytest.approx(
            (7 if name == "first to second" else 8) / 17, abs=1e-6
        )
        assert all(kinds[0, one.query] != kinds[0, one.key] for one in score.evidence)
    assert seen.heads[0].scores["first to second"].evidence
    assert "first to second" not in look.at(Pair(9, 8), {"input_ids": ids}, repeats=None).heads[0].scores


def test_separators_stops_and_commas_apart() -> None:
    tables = Tables(delimiters=(3,))
    model, _ = constructed([["delimiter", "[SEP]"]], kind="encoder", tables=tables)
    ids = model.sample(29)[0].tolist()
    ids[5:20:5] = [3, 4, 3]
    for mark, role in ((".", "full stop"), (",", "comma")):
        names = [{1: "[CLS]", 2: "[SEP]", 3: mark, 4: {".": ",", ",": "."}[mark]}.get(i, f"w{i}") for i in ids]
        seen = look.at(model, ids, tokens=names, repeats=None)
        stop, separator = seen.heads
        assert role in {score.name for score in stop.roles}
        assert not {"full stop", "comma", "[SEP]"} - {role} & {score.name for score in stop.roles}
        assert {score.name for score in separator.roles} & {"[SEP]", "full stop", "comma"} == {"[SEP]"}


def test_a_spectrogram_in_patches_is_drawn_with_time_to_the_right() -> None:
    """The model gets frames by bins; what is drawn is bins by frames, low tones at the bottom, as its patches lie."""
    sizes = SMALL | dict(num_hidden_layers=1, patch_size=4, frequency_stride=4, time_stride=4)
    model = transformers.ASTModel(transformers.ASTConfig(**sizes, max_length=40, num_mel_bins=12))
    sound = torch.zeros(1, 40, 12)
    sound[:, :20, 0] = 5.0  # the lowest tone, in the first half
    seen = look.at(model, {"input_values": sound}, repeats=None)
    [axis], [drawn] = seen.axes, seen.pictures
    assert (axis.grids, axis.cells[2], axis.cells[-1]) == (((3, 10),), (0, 2, 0), (0, 0, 9))
    assert (drawn.kind, drawn.width, drawn.height) == ("sound", 40, 12)
    red = np.asarray(Image.open(io.BytesIO(drawn.data)))[..., 0]
    assert bool((red[-1, :20] == 255).all()) and int((red != 0).sum()) == 20


# -- inputs, axes, pictures --------------------------------------------------------------------------------------------


@pytest.mark.unchecked
def test_inputs_that_no_processor_gives_are_refused_in_our_words() -> None:
    model, _ = constructed_picture([["self"]], (3, 5))
    text, _ = constructed([["self"]])
    good = model.sample()
    rule = "ConstructedPicture is called with what its processor gives"
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (model, {}, ValueError, f"{rule}: one of input_ids, decoder_input_ids, pixel_values, input_features, input_va"),
        (model, {"pixels": good}, ValueError, f"{rule}: it takes pixel_values; got 'pixels'; leave that out"),
        (model, {3: good}, TypeError, f"{rule}, by name; got 3 for a name"),
        (model, {"pixel_values": "a.png"}, TypeError, f"{rule}: tensors, arrays or lists of numbers; got 'a.png' for"),
        (model, {"pixel_values": good[0, 0, 0, :0]}, ValueError, "pixel_values holds nothing, got shape (0,)"),
        (model, {"pixel_values": good[0, 0, 0]}, ValueError, "pictures (N, C, height, width) or one sound (1, ...)"),
        (model, {"pixel_values": good * torch.inf}, ValueError, "pixel_values holds NaN or infinite numbers"),
        (model, {"pixel_values": good.long()}, TypeError, "pixel_values are floats, as the processor makes them; got"),
        (model, {"pixel_values": good.to("meta")}, ValueError, "pixel_values is on the meta device"),
        (listener(), {"input_features": pixels(2, 5, 22)}, ValueError, "one sound (1, ...); got input_features of (2"),
        (listener(), {"input_features": pixels(1, 5, 22), "decoder_input_ids": [1, 99]}, ValueError, "got 99 at place"),
        (Pair(3, 4), {"input_ids": [1] * 7, "token_type_ids": [[0, 1]]}, ValueError, "one for each id; got 2 for 7"),
        (Pair(3, 4), {"input_ids": [1.5]}, TypeError, "the integers a tokenizer gives; got torch.float32"),
        ("vit", {"pixel_values": good}, TypeError, "look needs a torch.nn.Module, got str"),
        (text, {"input_ids": [1, 5], "attention_mask": [[1, 0]]}, ValueError, "attention_mask has zeros: cut those"),
    ]
    for model, read, error, message in cases:
        if isinstance(read, dict) and "attention_mask" in read:
            model.forward = lambda ids, attention_mask=None: None
        with pytest.raises(error, match=re.escape(message)):
            look.at(model, read)


def test_which_place_is_which_patch() -> None:
    plain = axes.over_patches((2, 3), 6)
    assert plain.apart == {} and plain.cells == tuple((0, r, c) for r in range(2) for c in range(3))
    full = axes.over_patches((2, 3), 11, registers=4)
    assert full.apart == {"[CLS]": (0,), "registers": (1, 2, 3, 4)} and full.cells[5] == (0, 0, 0)
    assert axes.over_patches((2, 3), 8).apart == {"[CLS]": (0,), "further token": (1,)}
    for length in (5, 6 + 65):
        assert not axes.over_patches((2, 3), length).known
    assert axes.upside_down(full).cells[5] == (0, 1, 0)
    text = axes.in_text([1, 9, 9, 5], ["a", "b", "c", "d"], 9, [(1, 2, 4)])  # 8 patches in 2 places: 2 x 2 each
    assert text.cells == ((-1,) * 3, (0, 0, 0), (0, 0, 1), (-1,) * 3) and text.grids == ((1, 2),)
    assert not any(cell != axes.NOWHERE for cell in axes.in_text([9, 9, 9], "abc", 9, [(1, 2, 4)]).cells)
    for broken in (dict(names=("a",)), dict(cells=((0, 0, 0),))):
        with pytest.raises(ValueError, match="an axis of 2 places has as many"):
            axes.Axis(axes.TEXT, 2, **broken)
    with pytest.raises(ValueError, match="an axis is one of text, picture, sound, text and picture; got 'smell'"):
        axes.Axis("smell", 2)
    for grids in (((-2, 3),), ((2, 3), (2, 0))):
        with pytest.raises(ValueError, match=re.escape(f"grids have a row and a column at least; got {grids[-1]}")):
            axes.Axis(axes.PICTURE, 2, grids=grids)
    for cell in ((0, 2, 0), (0, 0, 3), (0, -1, 0), (0, 0, -1), (1, 0, 0), (-2, 0, 0)):
        with pytest.raises(ValueError, match=re.escape(f"in its grids ((2, 3),), or (-1, -1, -1); got {cell}")):
            axes.Axis(axes.PICTURE, 2, cells=((0, 1, 2), cell), grids=((2, 3),))
    for place in (2, -1):
        with pytest.raises(
            ValueError, match=f"^an axis of 2 places has no place {place}, which apart calls 'registers'"
        ):
            axes.Axis(axes.PICTURE, 2, apart={"registers": (0, place)})


def test_pictures_are_png_files_of_what_the_model_got() -> None:
    x = torch.randint(0, 256, (3, 7, 5), generator=torch.Generator().manual_seed(1)).float()
    x[0, 0, 0], x[0, 0, 1] = 0, 255
    one = pictures.picture_of(x / 51 - 2)
    assert one is not None and (one.width, one.height) == (5, 7)
    read = Image.open(io.BytesIO(one.data))
    assert torch.equal(torch.tensor(list(read.convert("RGB").tobytes())).view(7, 5, 3), x.movedim(0, -1).long())
    wide = pictures.picture_of(pixels(3, 900, 13))
    assert wide is not None and wide.height <= pictures.MOST_SIDE
    assert pictures.picture_of(pixels(2, 4, 4)) is None and pictures.picture_of(x * torch.nan) is None
    assert pictures.sound_of(x * torch.nan) is None and pictures.sound_of(pixels(1, 2, 3)) is None
    tone = torch.sin(torch.arange(4000) * 2 * torch.pi * 0.1)  # a tenth of the rate: a fifth of the way up
    heard = pictures.sound_of(tone)
    assert heard is not None
    bright = torch.tensor(list(Image.open(io.BytesIO(heard.data)).convert("L").tobytes())).view(heard.height, -1)
    assert int(bright.float().mean(1).argmax()) == pytest.approx(0.8 * heard.height, abs=2)


def test_patches_in_blocks_become_the_picture_again() -> None:
    x = pixels(3, 8, 16)  # 2 x 4 patches of 4 x 4, in blocks of 2 x 2
    rows = [x[:, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4] for _, r, c in axes.in_blocks(2, 4, 2)]
    flat = torch.stack([torch.stack([one, one], 1).flatten() for one in rows])
    whole = pictures.patched(flat, (1, 2, 4), 2, 4)
    assert whole is not None and torch.equal(whole, x)
    assert pictures.patched(flat, (1, 3, 4), 2, 4) is None


def test_a_look_at_a_picture_travels_as_json() -> None:
    model, _ = constructed_picture([["self", "right neighbour"]], (3, 5), registers=2)
    seen = look.at(model, {"pixel_values": model.sample()})
    assert look.Look.from_dict(json.loads(seen.to_json(maps=True))) == seen
    assert look.Look.from_dict(json.loads(seen.to_json())).axes == seen.axes

"""What `headwise.look.at` reads and refuses, how it calls the model and leaves it; the repeated random tokens."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from planted import Planted, Tiny, Twice, text
from torch import Tensor, nn

import headwise
from headwise import look
from headwise.look import Passage, Repeats
from headwise.look.inputs.ids import IdFacts, check_heads, vocabulary
from headwise.look.inputs.repeated_tokens import draw, targets
from headwise.look.roles.catalog import SENTENCES
from headwise.nn import AttentionCall


def test_the_model_is_left_as_it_was() -> None:
    model = Tiny(mask=headwise.causal()).train()
    model.layers[0].eval()
    modes = [part.training for part in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    look.at(model, text())
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())
    model(torch.tensor([text()])).sum().backward()  # no inference tensor was left behind


def test_dropout_is_off_while_looking() -> None:
    model = Tiny(mask=headwise.causal())
    first = look.at(model.train(), text(), repeats=None)
    assert first.heads == look.at(model.eval(), text(), repeats=None).heads


def test_modes_are_put_back_after_an_error() -> None:
    class Broken(Tiny):
        def forward(self, ids: Tensor) -> Tensor:
            super().forward(ids)
            raise RuntimeError("broken")

    model = Broken().train()
    with pytest.raises(RuntimeError, match="broken"):
        look.at(model, text())
    assert model.training and model.drop.training


def test_progress_counts_calls() -> None:
    steps: list[tuple[int, int]] = []
    look.at(Tiny(), text(), progress=lambda done, total: steps.append((done, total)))
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    look.at(Twice(), text(), progress=lambda done, total: steps.append((done, total)), repeats=None)
    assert steps[4:] == [(1, 1), (2, 2)]


@pytest.mark.parametrize(
    "ids",
    [torch.tensor(text(7)), torch.tensor([text(7)]), np.array(text(7), np.int32), text(7), tuple(text(7)), [text(7)]],
)
def test_ids_in_every_form(ids: Any) -> None:
    record = look.at(Tiny(), ids, repeats=None)
    assert record.length == 7 and record.tokens == tuple(str(i) for i in text(7))


def test_delimiters_are_read_from_the_tokens() -> None:
    tokens = [" .", " .", "b", "\n", "", " "]
    model, ids = Planted(["delimiter"]), [2, 2, 5, 3, 6, 7]  # attends 2 and 3; the first key is the sink's, not counted
    record = look.at(model, ids, tokens=tokens, repeats=None)
    assert record.heads[0].value("delimiter") == pytest.approx((1 / 2 + 1 / 2 + 2 / 3 + 2 / 3 + 2 / 3) / 5, abs=1e-4)
    assert look.at(model, ids, repeats=None).heads[0].value("delimiter") is None
    assert look.at(model, ids, tokens=tokens, delimiters=[], repeats=None).heads[0].value("delimiter") is None


class Overflowing(Tiny):
    def forward(self, ids: Tensor) -> Tensor:
        return self.layers[0](torch.full((1, ids.shape[1], 24), math.nan), mask=self.mask)


class Folded(Tiny):
    def forward(self, ids: Tensor) -> Tensor:
        return self.layers[0](self.embed(ids.view(2, -1)))


class Configured(Tiny):
    """A model that tells its sizes as many libraries' models do."""

    class config:
        vocab_size, max_position_embeddings, name_or_path = 47, 19, "somebody/model"
        bos_token_id, eos_token_id, pad_token_id, unk_token_id, mask_token_id = 1, [44, 45], None, 20, 21


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("model", "ids", "options", "error", "message"),
    [
        (Tiny(), [], {}, ValueError, "at least one token, got ids of shape (0,); give a longer text"),
        (Tiny(), torch.zeros(1, 0).long(), {}, ValueError, "at least one token, got ids of shape (1, 0)"),
        (Tiny(), torch.zeros(2, 7).long(), {}, ValueError, "ids (T,) or (1, T); got (2, 7); look at each"),
        (Tiny(), torch.zeros(5, device="meta").long(), {}, ValueError, "are on the meta device and hold no num"),
        (Tiny(), [1, 2], {"readings": {"sentence": []}}, ValueError, "got 'sentence'"),
        (Tiny(), [1, 2], {"readings": {SENTENCES: "a text"}}, TypeError, "is a list of headwise.look.Passage; got 'a"),
        (Tiny(), [1, 2], {"readings": {SENTENCES: [[1, 2]]}}, TypeError, "holds headwise.look.Passage; got [1, 2]"),
        (Tiny(), [1, 2], {"readings": {SENTENCES: [Passage([1, 61])]}}, ValueError, "0 to 60; got 61 at place 1"),
        (Tiny(), torch.tensor(3), {}, ValueError, "one text at a time, ids (T,) or (1, T); got ()"),
        (Tiny(), torch.zeros(5), {}, TypeError, "the integers a tokenizer gives; got torch.float32; convert"),
        (Tiny(), torch.ones(5, dtype=torch.bool), {}, TypeError, "a tokenizer gives; got torch.bool; convert"),
        (Tiny(), torch.ones(5, dtype=torch.complex64), {}, TypeError, "a tokenizer gives; got torch.complex64; conv"),
        (Tiny(), "a text", {}, TypeError, "got str; pass tokenizer(text)['input_ids']"),
        (Tiny(), [1, 61], {}, ValueError, "ids of this model are 0 to 60; got 61 at place 1 (1 of 2 ids do not fit)"),
        (Tiny(), [-1, 2], {}, ValueError, "got -1 at place 0"),
        (Configured(), [1, 47], {}, ValueError, "ids of this model are 0 to 46; got 47 at place 1"),
        (Configured(), [1] * 20, {}, ValueError, "20 tokens, but the model takes 19 positions; give a shorter"),
        (Tiny(), [1, 2], {"tokens": ["a"]}, ValueError, "got 1 tokens for 2 ids; give one each"),
        (Tiny(), [1, 2], {"map_size": 0}, ValueError, "map_size is at least 1; got 0"),
        (Tiny(), [1, 2], {"repeats": Repeats(vocabulary=[4, 61])}, ValueError, "0 to 60; got 61 at place 1"),
        (nn.Linear(2, 2), [1], {}, TypeError, "Linear holds no headwise.MultiHeadAttention"),
        (Overflowing(), [1, 2], {}, ValueError, "layer 0 ('layers.0') has scores that are NaN or infinite in float32"),
        (Folded(), [1, 2], {}, ValueError, "module 'layers.0' made 2 rows of 1 text"),
    ],
)  # fmt: skip
def test_errors(model: nn.Module, ids: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        look.at(model, ids, **options)


def test_what_a_config_tells_is_used() -> None:
    seen: list[Tensor] = []

    class Watching(Configured):
        def forward(self, ids: Tensor) -> Tensor:
            seen.append(ids)
            assert not torch.is_grad_enabled()
            return super().forward(ids)

    record = look.at(Watching(mask=headwise.causal()), [1, 5, 6, 44], delimiters=[9, 10])
    assert record.model == "somebody/model" and look.at(Tiny(), [1], name="mine").model == "mine"
    copies = seen[1]
    assert copies.shape == (6, 19) and copies[:, 0].eq(1).all() and copies.max() < 47
    assert not torch.isin(copies[:, 1:], torch.tensor([1, 44, 20, 21, 9, 10])).any()
    look.at(Watching(), [5, 6, 7, 44], delimiters=[9, 10])
    assert seen[3][:, 0].eq(1).all() and seen[3][:, -1].eq(44).all()
    look.at(Watching(), [5, 6, 9], delimiters=[9, 10])  # what ends an encoder's text ends its copies, a mark as well
    assert seen[5][:, -1].eq(9).all() and not seen[5][:, :-1].eq(9).any()
    look.at(Watching(), [5, 6, 7])  # but not a word of it
    assert not seen[7][:, -1].eq(7).all()
    look.at(Watching(mask=headwise.causal()), [5, 6, 44])  # and nothing ends a decoder's
    assert not seen[9].eq(44).any()
    look.at(Watching(), [5, 6, 7], delimiters=[9], repeats=Repeats(vocabulary=[9, 20, 30]))
    assert set(seen[11][:, 1:].flatten().tolist()) == {9, 20, 30}  # what was asked for is not avoided


class Adapted(nn.Module):
    """As an adapter library wraps: the model inside has the adapters in its layers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"model": model})

    def get_base_model(self) -> nn.Module:
        return self.base_model["model"]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's compiler
def test_a_wrapped_model_is_looked_at_as_what_it_wraps() -> None:
    model = Tiny(mask=headwise.causal())
    bare = look.at(model, text(7), repeats=None)
    for wrapped in (nn.DataParallel(model), Adapted(model), torch.compile(Adapted(model), backend="eager")):
        record = look.at(wrapped, text(7), repeats=None)
        assert (record.model, record.heads, record.maps) == (bare.model, bare.heads, bare.maps)


class Sound(Tiny):
    main_input_name = "input_values"


class Talking(Tiny):
    """Reads sound beside its text, and cannot do without."""

    main_input_name, input_modalities = "input_ids", ("audio", "text")
    late = False

    def forward(self, ids: Tensor) -> Tensor:
        if self.late:
            super().forward(ids)
        raise AttributeError("no sound")


class Silent(Talking):
    input_modalities = ("text",)


class Mute(Talking):
    input_modalities = "text"


NO_TEXT = "ids are a text, and "
DO = "; give look.at what its processor gives, such as processor(images=image, return_tensors='pt'), or look at its"


@pytest.mark.unchecked
def test_a_model_that_does_not_read_text_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape(f"{NO_TEXT}Sound takes 'input_values'{DO}")):
        look.at(Sound(), [1, 99])  # and the ids are not blamed
    with pytest.raises(TypeError, match=re.escape("look needs a torch.nn.Module, got str; load the model first")):
        look.at("gpt", [1])  # type: ignore[arg-type]


@pytest.mark.unchecked
def test_a_model_that_needs_more_than_text_is_refused() -> None:
    model = Talking()
    what = "Talking takes audio and text, and does not run on ids alone (AttributeError: no sound)"
    with pytest.raises(ValueError, match=re.escape(NO_TEXT + what + DO)) as caught:
        look.at(model, [1, 2])
    assert isinstance(caught.value.__cause__, AttributeError)
    model.late = True
    with pytest.raises(AttributeError, match="no sound"):  # calls were measured: their faults are told as they are
        look.at(model, [1, 2])
    for reads_text in (Silent(), Mute()):
        with pytest.raises(AttributeError, match="no sound"):
            look.at(reads_text, [1, 2])


class Sundry:
    """A config that will not say how many heads its layers have."""

    @property
    def num_attention_heads(self) -> int:
        raise LookupError("they differ")


@pytest.mark.unchecked
def test_a_part_of_the_heads_is_not_taken_for_the_whole() -> None:
    call = AttentionCall("a.b", 0, torch.zeros(1, 2, 3, 5), torch.zeros(1, 1, 3, 5))
    split = "module 'a.b' ran 2 query heads and has 4: the model is split over processes (tensor parallelism), and its"
    for fields in ({"num_heads": 4}, {"num_attention_heads": 4}, {"config": SimpleNamespace(num_attention_heads=4)}):
        with pytest.raises(ValueError, match=re.escape(split)):
            check_heads(SimpleNamespace(**fields), call)
    whole = SimpleNamespace(num_attention_heads=2)
    other = SimpleNamespace(num_attention_heads=4)  # as where an encoder and a decoder share a config
    for fields in ({}, {"num_heads": 2, "config": other}, {"num_heads": 4, "config": whole}, {"config": whole}):
        check_heads(SimpleNamespace(**fields), call)
    for said in (None, "4", [2, 4]):
        check_heads(SimpleNamespace(num_heads=said, config=Sundry()), call)


class Loose(Tiny):
    """A config that says little: no limit on positions, a BOS and a name that are none, its ids in a nested config."""

    class config:
        max_position_embeddings, name_or_path, vocab_size = -1, "", None

        @staticmethod
        def get_text_config() -> type:
            return Loose.text

    class text:
        vocab_size, max_position_embeddings, bos_token_id = 31, 0, -1


def test_what_a_config_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look.at(Configured(), [1] * 19, repeats=None).length == 19  # as many as it has positions
    model = Loose()
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    assert look.at(model, [5, 6, 7]).model == "Loose"
    assert seen[1].max() < 31 and seen[1][:, 0].eq(5).all() and not seen[1][:, 1:].eq(5).any()
    with pytest.raises(ValueError, match="ids of this model are 0 to 30; got 31"):
        look.at(model, [31])
    monkeypatch.setattr(Loose.text, "vocab_size", "31")  # no number: the embedding tells
    assert look.at(model, [60], repeats=None).length == 1


def test_the_version_of_a_tree_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert look.at(Tiny(), [1], repeats=None).version == "unknown"


class Asked(nn.Module):
    """An encoder-decoder that keeps the arguments of its forwards."""

    class config:
        vocab_size, bos_token_id, decoder_start_token_id = 47, 1, 3

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.requests = Twice(), list[dict[str, Any]]()

    def forward(
        self, ids: Tensor, decoder_input_ids: Tensor, use_cache: bool = True, logits_to_keep: int = 0
    ) -> Tensor:
        self.requests.append({"ids": ids, "decoder": decoder_input_ids, "lean": (use_cache, logits_to_keep)})
        return self.inside(ids)


def test_how_the_model_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Asked()
    look.at(model, [1, 5, 6, 7, 8])
    text_pass, copies = model.requests
    assert text_pass["ids"].tolist() == [[1, 5, 6, 7, 8]] and text_pass["decoder"].tolist() == [[3, 1, 5, 6]]
    assert text_pass["lean"] == copies["lean"] == (False, 1)
    assert copies["ids"].shape == (6, 72) and copies["decoder"].shape == (6, 71)
    assert copies["decoder"][:, 0].eq(3).all() and torch.equal(copies["decoder"][:, 1:], copies["ids"][:, :70])
    for length in (1, 2, 3):
        look.at(model, [1, 5, 6][:length], repeats=None)
        assert model.requests[-1]["decoder"].tolist() == [[3, 1][: max(1, length - 1)]]
    monkeypatch.delattr(Asked.config, "decoder_start_token_id")
    look.at(model, [5, 6, 7], repeats=None)
    assert model.requests[-1]["decoder"].tolist() == [[1, 5]]


# --- repeated random tokens -----------------------------------------------------------------------------------------


def test_drawn_sequences() -> None:
    drawn = draw(Repeats(8, 160), range(100, 400), 999, before=[7], after=[8])
    periods = []
    for sequence in drawn:
        assert len(sequence.ids) == 160 and sequence.ids[0] == 7 and sequence.ids[-1] == 8
        body = sequence.ids[1:-1]
        period = len(sequence.drawn)
        periods.append(period)
        assert len(set(body[:period])) == period and all(100 <= i < 400 for i in body)
        assert body == (body[:period] * 9)[:158] and sequence.opener == body[0]
    assert len(set(periods)) == 8 and min(periods) >= 158 // 5 and max(periods) <= 2 * 158 // 5
    assert draw(Repeats(), range(100, 400), 999, before=[7]) == draw(Repeats(), range(100, 400), 999, before=[7])
    assert draw(Repeats(seed=1), range(100, 400), 999) != draw(Repeats(seed=2), range(100, 400), 999)


def test_few_positions_and_few_ids() -> None:
    assert draw(Repeats(), range(50), 8, before=[1]) == []
    shortest = draw(Repeats(), range(50), 9, before=[1])
    assert len(shortest) == 6 and {len(sequence.drawn) for sequence in shortest} == {2, 3}
    exact = draw(Repeats(sequences=9, length=40), range(16), 40)  # periods of 8 to 16: one each, with tokens for all
    assert sorted(len(sequence.drawn) for sequence in exact) == [*range(8, 17)]
    assert draw(Repeats(), [3], 99) == []
    assert set(draw(Repeats(), [3, 4], 99)[0].ids) == {3, 4}
    for wrong in ({"sequences": 0}, {"length": 0}):
        got = re.escape(", ".join(f"{name}={n}" for name, n in ({"sequences": 6, "length": 72} | wrong).items()))
        with pytest.raises(ValueError, match=f"got {got}; repeats=None leaves them out"):
            Repeats(**wrong)


def test_what_opens_and_ends_a_text_is_no_copy() -> None:
    [sequence] = draw(Repeats(sequences=1), range(9, 99), 31, before=[7], after=[7])
    copies = targets(sequence, ahead=True)["duplicate"]
    assert sequence.ids[0] == sequence.ids[30] == 7 and copies[0] == copies[30] == [] and all(copies[1:30])


@pytest.mark.parametrize(("positions", "passes"), [(8, 1), (9, 2)])
def test_a_model_too_short_for_copies_reads_none(positions: int, passes: int) -> None:
    model = Tiny(mask=headwise.causal())
    model.config = SimpleNamespace(max_position_embeddings=positions)
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    record = look.at(model, [1, 2, 3])
    assert len(seen) == passes and ("duplicate-token" not in record.heads[0].scores) is (passes == 1)


@pytest.mark.parametrize("ahead", [False, True])
def test_targets_by_their_definition(ahead: bool) -> None:
    [sequence] = draw(Repeats(sequences=1, seed=2), [5, 6, 7, 8, 9], 41, before=[1])
    ids = sequence.ids
    linked = targets(sequence, ahead=ahead)
    assert len(linked["duplicate"]) == len(linked["induction"]) == 41
    for i in range(41):
        same = {j for j in range(1, 41) if ids[j] == ids[i] and (j < i or (ahead and j != i))}
        after = {j for j in range(2, i) if ids[j - 1] == ids[i]}
        after = set() if ahead or ids[i] == sequence.opener else after
        assert set(linked["duplicate"][i]) == (same if i else set())
        assert set(linked["induction"][i]) == (after if i else set())


def test_a_mark_behind_a_blank_is_a_delimiter_however_the_tokenizer_writes_blanks() -> None:
    marks = ["\u0120.", "\u2581,", " ;", "!", "a."]
    words = vocabulary([11, 12, 13, 14, 15], marks, None, IdFacts(50, None, {}, 11, 15))
    assert (words.delimiters, words.stops, words.commas) == ({11, 12, 13, 14}, {11}, {12})


def test_what_separates() -> None:
    """A config's `sep`, special tokens that the caller calls delimiters, and tokens that are written so."""
    facts = IdFacts(50, None, {"bos": 1, "sep": 4, "eos": 5}, 1, 5)
    ids, tokens = [1, 7, 8, 4, 9, 8, 5, 6], ["<s>", "a", ".", "<sep>", "b", ".", "</s>", "[SEP]"]
    assert vocabulary(ids, tokens, None, facts).separators == {4, 6}
    assert vocabulary(ids, tokens, {5, 8}, facts).separators == {4, 5, 6}
    assert vocabulary(ids[:3], tokens[:3], None, replace(facts, special={"bos": 1})).separators == set()

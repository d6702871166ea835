"""transformers' masks arrive as headwise masks that mean the same, and what cannot be read is evaluated."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hf_measure import counted, distance, logged
from hf_models import BY_NAME, VOCAB, WINDOW, B, T, inputs, logits, padding, token_ids
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import StaticCache
from transformers import masking_utils as theirs

from headwise.hf import StructuralMask
from headwise.hf.attention import mask_closures as closures
from headwise.hf.attention.mask import headwise_mask
from headwise.hf.attention.mask_closures import Frame, read_mask, read_padding
from headwise.hf.models.architectures import CACHE
from headwise.ops.masks import Mask
from headwise.ops.masks.rules import Band, Keep, Lengths, Segments
from headwise.testing import largest_tensor

STARTS = torch.tensor([0, 2, 3])
FUNCTIONS = {
    "causal": theirs.causal_mask_function,
    "bidirectional": theirs.bidirectional_mask_function,
    "window": theirs.sliding_window_causal_mask_function(3),
    "window of 1": theirs.sliding_window_causal_mask_function(1),
    "wide window": theirs.sliding_window_causal_mask_function(50),
    "both ways": theirs.sliding_window_bidirectional_mask_function(2),
    "self only": theirs.sliding_window_bidirectional_mask_function(0),
    "chunks": theirs.chunked_causal_mask_function(3, STARTS),
    "nested": theirs.and_masks(theirs.and_masks(theirs.causal_mask_function), theirs.sliding_window_overlay(4)),
}
FRAMES = {
    "square": Frame(B, 7, 7),
    "chunk": Frame(B, 3, 11, q_offset=8),
    "step": Frame(B, 1, 7, q_offset=6),
    "static prefill": Frame(B, 5, 13),
    "rolled window": Frame(B, 3, 6, q_offset=9, kv_offset=6),
    "cross": Frame(B, 7, 5),
}
PADDINGS = {"none": None, "left": padding("left", 17), "right": padding("right", 17), "holes": padding("holes", 17)}


def truth(function: Any, frame: Frame, pad: Tensor | None) -> Tensor:
    """(B, 1, T, S), by transformers."""
    return theirs.sdpa_mask(
        frame.B, frame.T, frame.S, frame.q_offset, frame.kv_offset, function, pad,
        allow_is_causal_skip=False, allow_is_bidirectional_skip=False,
    )  # fmt: skip


def drawn(mask: Mask, frame: Frame) -> Tensor:
    return mask.dense(frame.T, frame.S).expand(frame.B, 1, -1, -1)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_read_is_what_transformers_means(name: str) -> None:
    for (kind, frame), (side, pad) in itertools.product(FRAMES.items(), PADDINGS.items()):
        pad = pad if pad is None else pad[:, : frame.q_offset + frame.T].bool()
        mask = read_mask(FUNCTIONS[name], frame)
        mask = mask if mask is None or pad is None else mask & read_padding(pad, frame)
        assert mask is not None, (name, kind)
        assert torch.equal(drawn(mask, frame), truth(FUNCTIONS[name], frame, pad)), (name, kind, side)
        assert not any(isinstance(part, Keep) and part.tensor.shape[2] > 1 for part in mask.parts)


def test_windows_count_as_headwise_counts() -> None:
    """`sliding_window=3` is 3 keys with self among them; both ways, 2 is 2 on either side and self."""
    frame = FRAMES["square"]
    assert read_mask(FUNCTIONS["window"], frame).parts[0] == _like(Band(3, 0, 0))
    assert read_mask(FUNCTIONS["both ways"], frame).parts[0] == _like(Band(3, 2, 0))
    assert read_mask(FUNCTIONS["causal"], FRAMES["rolled window"]).parts[0] == _like(Band(None, 0, 3))


class _like:
    """Equal to a rule of the same text (rules themselves compare by identity)."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule

    def __eq__(self, other: object) -> bool:
        return repr(other) == repr(self.rule)


RENUMBERS = hasattr(theirs, "remap_positions_for_packed_sequence")
renumbers = pytest.mark.skipif(not RENUMBERS, reason="this transformers does not renumber packed sequences")


def packed_function(inner: str, positions: Tensor, sequence: Tensor) -> Any:
    """The mask function that transformers makes for a packed batch: positions begin anew with each sequence."""
    remapped = theirs.remap_positions_for_packed_sequence(FUNCTIONS[inner], positions)
    return theirs.and_masks(remapped, theirs.packed_sequence_mask_function(sequence))


@renumbers
@pytest.mark.parametrize("inner", ["causal", "window", "chunks", "bidirectional"])
def test_packed_sequences_are_read(inner: str) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6], [4, 5, 0, 1, 2, 3, 9]])
    sequence = theirs.find_packed_sequence_indices(positions)
    function = packed_function(inner, positions, sequence)
    frame = FRAMES["square"]
    mask = read_mask(function, frame)
    assert any(isinstance(part, Segments) for part in mask.parts)
    assert torch.equal(drawn(mask, frame), truth(function, frame, None))


@renumbers
def test_positions_of_other_sequences_are_not_read() -> None:
    """Renumbered positions beside a packing that is not their own would not be a band."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1]]).expand(B, -1)
    function = packed_function("causal", positions, torch.zeros(B, 7).long())
    assert read_mask(function, FRAMES["square"]) is None
    alone = theirs.remap_positions_for_packed_sequence(FUNCTIONS["causal"], positions)
    assert read_mask(alone, FRAMES["square"]) is None


def test_packed_sequences_at_other_places_are_evaluated() -> None:
    """The numbers of the sequences count the queries and the keys alike only where both begin at 0 and end alike."""
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2]]).expand(B, -1)
    function = theirs.packed_sequence_mask_function(ids)
    later = dict(q_offset=4), dict(q_offset=4, kv_offset=4)
    for frame in (Frame(B, 3, 3), Frame(B, 3, 7, **later[0]), Frame(B, 3, 4, **later[0]), Frame(B, 3, 3, **later[1])):
        assert read_mask(function, frame) is None
        mask = headwise_mask(B, frame.T, frame.S, frame.q_offset, frame.kv_offset, mask_function=function)
        assert torch.equal(drawn(mask.mask, frame), truth(function, frame, None))
    assert read_mask(function, Frame(B, 7, 7, q_offset=1, kv_offset=1)) is None
    assert read_mask(function, Frame(B, 7, 7)) is not None


def test_padding_of_one_run_a_row_is_two_numbers() -> None:
    frame = Frame(B, 1, 9)
    for side in ("left", "right"):
        (part,) = read_padding(padding(side, 9), frame).parts
        assert isinstance(part, Lengths)
    (part,) = read_padding(padding("holes", 9), frame).parts
    assert isinstance(part, Keep) and part.tensor.shape == (B, 1, 1, 9)
    assert read_padding(padding("none", 9), frame).parts == ()
    empty = read_padding(torch.zeros(B, 9), frame)
    assert not empty.allowed(1, 9).any()


def test_a_padding_mask_of_another_form_is_refused() -> None:
    model = BY_NAME["Llama GQA"].build()
    model.set_attn_implementation("headwise")
    with pytest.raises(
        ValueError, match=r"a padding mask is \(B, S\), .* got \(3, 7, 7\): .* attention_mask\[:, None\]"
    ):
        model(token_ids(7), attention_mask=torch.ones(B, 7, 7).tril())


@pytest.mark.parametrize("name", ["Llama GQA", "Llama4 chunked"])
def test_a_model_on_the_meta_device_tells_its_shapes(name: str) -> None:
    """There are no numbers to read of the padding."""
    model = BY_NAME[name].build().to("meta")
    model.set_attn_implementation("headwise")
    out = model(token_ids(7).to("meta"), attention_mask=padding("left", 7).to("meta"))
    assert out.logits.shape == (B, 7, VOCAB) and out.logits.is_meta


def test_what_is_not_understood_is_evaluated() -> None:
    """The union of a band with blocks, a caller's own function, and a callable object."""
    blocks = torch.tensor([[-1, 0, 0, 1, 1, 1, -1]]).expand(B, -1)
    unions = theirs.or_masks(theirs.causal_mask_function, theirs.blockwise_overlay(blocks))

    class Every3rd:
        def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q - k) % 3 == 0

    frame, pad = FRAMES["square"], padding("left", 7).bool()
    for function in (unions, lambda b, h, q, k: q != k, Every3rd()):
        assert read_mask(function, frame) is None
        both = theirs.and_masks(theirs.causal_mask_function, function)
        assert read_mask(both, frame) is None
        result = headwise_mask(B, 7, 7, mask_function=both, attention_mask=pad)
        assert torch.equal(drawn(result.mask, frame), truth(both, frame, pad))


def test_a_reader_that_disagrees_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """If an upgrade changes what a window means, its closure looks the same; trying it out tells."""

    def other_overlay(sliding_window: int) -> Any:
        def inner_mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return k >= q - sliding_window  # one more than before

        return inner_mask

    monkeypatch.setattr(theirs, "sliding_window_overlay", other_overlay)
    closures.trusted_readers.cache_clear()
    try:
        with logged() as text:
            function = theirs.sliding_window_causal_mask_function(3)
            assert read_mask(function, FRAMES["square"]) is None
        assert "sliding_window_overlay has changed its meaning" in text.getvalue()
        result = headwise_mask(B, 7, 7, mask_function=function)
        assert torch.equal(drawn(result.mask, FRAMES["square"]), truth(function, FRAMES["square"], None))
        assert read_mask(FUNCTIONS["causal"], FRAMES["square"]) is not None
    finally:
        closures.trusted_readers.cache_clear()


def test_all_readers_agree_with_the_installed_transformers() -> None:
    closures.trusted_readers.cache_clear()
    with torch.device("meta"):  # a default device of the caller's does not confuse the trial
        assert len(closures.trusted_readers()) == 8


def test_a_factory_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """All releases that the package takes have it; without it, masks would silently cost T x S."""
    monkeypatch.delattr(theirs, "sliding_window_overlay")
    closures.trusted_readers.cache_clear()
    try:
        with pytest.raises(AttributeError, match="sliding_window_overlay"):
            read_mask(theirs.causal_mask_function, FRAMES["square"])
    finally:
        closures.trusted_readers.cache_clear()


def test_no_mask_of_all_pairs_is_made() -> None:
    """At 4096 tokens, the largest tensor on the way to the mask has 4096 numbers a row of the batch, or fewer."""
    pad = torch.ones(2, 4096, dtype=torch.bool)
    pad[0, :100] = False
    for function in (FUNCTIONS["window"], theirs.chunked_causal_mask_function(64, torch.tensor([100, 0]))):
        with largest_tensor() as seen:
            headwise_mask(2, 4096, 4096, mask_function=function, attention_mask=pad)
        assert seen.numel <= 2 * 4096


def test_the_live_offset_of_a_static_cache_is_copied() -> None:
    live = torch.tensor(3)
    mask = headwise_mask(1, 2, 9, q_offset=live, mask_function=theirs.causal_mask_function)
    live += 5
    assert mask.mask.parts[0].offset == 3


def test_a_static_step_is_a_tensor_that_shuts_the_unused_room() -> None:
    mask = headwise_mask(B, 1, 9, q_offset=torch.tensor(4), mask_function=theirs.causal_mask_function)
    assert type(mask) is Tensor and mask.shape == (B, 1, 1, 9)
    assert mask[0, 0, 0].tolist() == [0.0] * 5 + [torch.finfo(torch.float32).min] * 4
    every = headwise_mask(B, 1, 9, q_offset=torch.tensor(8), allow_is_bidirectional_skip=True)
    assert type(every) is Tensor and not every.any(), "a tensor also where nothing is shut"


def test_the_object_passes_for_a_mask() -> None:
    mask = headwise_mask(B, 3, 5, mask_function=theirs.causal_mask_function, dtype=torch.bfloat16)
    assert isinstance(mask, StructuralMask) and isinstance(mask, Tensor)
    assert mask.shape == (B, 1, 3, 5) and mask.dtype == torch.bfloat16 and mask.device.type == "cpu"
    assert str(mask) == repr(mask) == f"StructuralMask({mask.mask}, shape=(3, 1, 3, 5))"


# -- in a model -------------------------------------------------------------------------------------------------------


def test_packing_by_position_ids_keeps_sequences_apart() -> None:
    for name in ("Llama GQA", "Mistral window", "Llama4 chunked"):
        model = BY_NAME[name].build()
        ids = token_ids(11)
        positions = torch.cat([torch.arange(4), torch.arange(7)])[None].expand(B, -1)
        error = distance(
            model,
            lambda m, ids=ids, at=positions: logits(m, dict(input_ids=ids, position_ids=at, use_cache=False)),
            torch.ones(B, 11, dtype=torch.bool),
        )
        assert error.ours <= error.budget, f"{name}: {error}"
        model.set_attn_implementation("headwise")
        packed = logits(model, dict(input_ids=ids, position_ids=positions, use_cache=False))
        alone = logits(model, dict(input_ids=ids[:, 4:], use_cache=False))
        torch.testing.assert_close(packed[:, 4:], alone, atol=2e-6, rtol=2e-6)


def test_chunks_across_sequences_named_by_their_ends_are_refused() -> None:
    """Llama 4's chunks are segments too: with a cache transformers counts them from the first token of the batch."""
    model = BY_NAME["Llama4 chunked"].build()
    model.set_attn_implementation("headwise")
    ids = token_ids(11)[:1]
    packed = dict(input_ids=ids, position_ids=torch.cat([torch.arange(5), torch.arange(6)])[None])

    def ends(*at: int) -> dict[str, Any]:
        return dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor(at, dtype=torch.int32))

    with pytest.raises(ValueError, match=r"Llama4TextAttention passes cu_seq_lens_k, .* pass position_ids that begin"):
        model(**packed, **ends(0, 5, 11))
    alone = torch.cat([logits(model, dict(input_ids=x)) for x in ids.split([5, 6], 1)], 1)
    if RENUMBERS:  # older releases count chunks from the first token of the batch, on every attention
        unpacked = logits(model, packed | ends(0, 5, 11) | dict(use_cache=False))
        torch.testing.assert_close(unpacked, alone, atol=2e-6, rtol=2e-6)
    packed["position_ids"] = torch.cat([torch.arange(WINDOW), torch.arange(11 - WINDOW)])[None]
    alone = torch.cat([logits(model, dict(input_ids=x)) for x in ids.split([WINDOW, 11 - WINDOW], 1)], 1)
    torch.testing.assert_close(logits(model, packed | ends(0, WINDOW, 11)), alone, atol=2e-6, rtol=2e-6)


def test_masks_of_the_user_pass_through() -> None:
    """4-D: bool, float with the lowest number or -inf, a bias, one a head."""
    model = BY_NAME["Llama GQA"].build()
    ids = token_ids(7)
    seen = torch.rand(B, 1, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.6
    seen |= torch.eye(7, dtype=torch.bool)
    lowest = torch.finfo(torch.float32).min
    added = torch.randn(B, 4, 7, 7)
    masks = {
        "bool": (seen, seen),
        "lowest": (torch.zeros(seen.shape).masked_fill(~seen, lowest), seen),
        "-inf": (torch.zeros(seen.shape).masked_fill(~seen, -torch.inf), seen),
        "one a head": (added.masked_fill(~seen, lowest), None),
    }
    for name, (mask, same) in masks.items():
        outputs = {}
        for implementation in ("eager", "headwise"):
            model.set_attn_implementation(implementation)
            if implementation == "eager" and same is not None:
                mask_in = torch.zeros(seen.shape).masked_fill(~same, lowest)
            else:
                mask_in = mask
            outputs[implementation] = logits(model, dict(input_ids=ids, attention_mask=mask_in))
        torch.testing.assert_close(outputs["headwise"], outputs["eager"], atol=5e-6, rtol=1e-5, msg=name)


def test_a_causal_model_made_bidirectional_by_its_config() -> None:
    model = BY_NAME["Llama GQA"].build()
    model.config.is_causal = False
    model.set_attn_implementation("headwise")
    ids = token_ids(7)
    for side in ("none", "right"):
        out = logits(model, dict(input_ids=ids, attention_mask=padding(side, 7)))
        ids[:, 1] = (ids[:, 1] + 1) % VOCAB
        moved = logits(model, dict(input_ids=ids, attention_mask=padding(side, 7)))
        assert (moved - out)[:, 0].abs().max() > 1e-3, "the first token sees the second"


def test_rows_of_padding_are_zero_and_harm_no_real_token() -> None:
    """Left padding: eager fills such rows with a mean; here they are 0, and real tokens are those of the text alone."""
    model = BY_NAME["Llama GQA"].build()
    model.set_attn_implementation("headwise")
    arguments = inputs(BY_NAME["Llama GQA"], "left")
    out = logits(model, arguments)
    assert out.isfinite().all()
    alone = logits(model, dict(input_ids=arguments["input_ids"][2:, 5:]))
    torch.testing.assert_close(out[2:, 5:], alone, atol=1e-5, rtol=1e-5)


def test_a_static_prefill_without_mask_is_aligned_top_left() -> None:
    """Through a plain call of the function: what other mask functions leave to is_causal."""
    from headwise.hf.attention.function import headwise_attention

    module = torch.nn.Module()
    module.is_causal = True
    q, k, v = (torch.randn(2, 4, n, 6) for n in (5, 9, 9))
    out, _ = headwise_attention(module, q, k, v, None)
    square, _ = headwise_attention(module, q, k[:, :, :5], v[:, :, :5], None)
    assert torch.equal(out, square)
    _, seen = headwise_attention(module, q, k, v, None, output_attentions=True)
    assert seen.shape == (2, 4, 5, 9) and not seen[..., 5:].any()


def test_a_static_cache_survives_a_prefill_in_one_call() -> None:
    model = BY_NAME["Mistral window"].build()
    model.set_attn_implementation("headwise")
    ids = token_ids(T)
    cache = StaticCache(config=model.config, max_cache_len=17)
    with torch.no_grad(), counted() as calls:
        out = model(input_ids=ids, **{CACHE: cache}, use_cache=True).logits
    torch.testing.assert_close(out, logits(model, dict(input_ids=ids, use_cache=False)), atol=1e-5, rtol=1e-5)
    assert len(calls) == 2


@pytest.mark.parametrize("name", ["Llama GQA", "Mistral window", "Llama4 chunked", "BERT", "T5"])
def test_fake_tensors_tell_the_shape(name: str) -> None:
    """Of them no mask can be read; what is known of transformers' functions afterwards is what is true."""
    closures.trusted_readers.cache_clear()
    with FakeTensorMode(), torch.no_grad():
        model = BY_NAME[name].build()
        model.set_attn_implementation("headwise")
        read = {"input_ids": torch.zeros(2, 11, dtype=torch.long), "attention_mask": torch.ones(2, 11)}
        seq2seq = {"decoder_input_ids": torch.zeros(2, 11, dtype=torch.long)} if name == "T5" else {}
        assert model(**read, **seq2seq)[0].shape[:2] == (2, 11)
    assert len(closures.trusted_readers()) > 4

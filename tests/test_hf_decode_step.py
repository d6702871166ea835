"""Layers of transformers' models step in one call with our caches where their code is known: with the same bits."""

from __future__ import annotations

import ast
import importlib
import inspect
import linecache
from types import FunctionType
from typing import Any

import pytest
import torch
import transformers
from backends import needs_native
from hf_models import BY_NAME, VOCAB, WINDOW, inputs, stir
from hf_steps import decoded, generated, prompt, steps
from native_cases import collected
from transformers import PreTrainedModel

import headwise.hf
from headwise.hf import decoding, make_cache, syntax
from headwise.hf.architectures import CACHE
from headwise.ops.native.library import trouble

pytestmark = needs_native
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=28, intermediate_size=17, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=6, max_position_embeddings=64, pad_token_id=0, eos_token_id=None,
)  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
    },
    "longrope": {
        "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 3.0, 5.0], "original_max_position_embeddings": 16,
        "factor": 4.0,
    },
}  # fmt: skip


_EIGHTS: dict[str, Any] = dict(hidden_size=32, head_dim=8)  # of which a part turns
SIZES: dict[str, dict[str, Any]] = {
    "Cohere2": dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "Exaone4": dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "ModernBertDecoder": dict(
        hidden_size=24, local_attention=4, layer_types=["sliding_attention", "full_attention"], bos_token_id=1,
        cls_token_id=1, sep_token_id=2,
    ),
    "Helium": dict(hidden_size=24),
    "Phi": _EIGHTS,
    "StableLm": _EIGHTS,
    "Persimmon": _EIGHTS,
    "SmolLM3": dict(no_rope_layers=[1, 0]),
    "Gemma4": dict(
        num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=WINDOW,
        global_head_dim=6, vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=5,
    ),
}  # fmt: skip
"""Sizes of configs, beside `_SIZES`."""


def a_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny one on headwise; a name of `ROPES` is Llama with that scaling."""
    if name in ROPES:
        rope = {"rope_type": name, "rope_theta": 1e4, **ROPES[name]}
        config = transformers.LlamaConfig(**_SIZES, rope_parameters=rope)
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="headwise")
        stir(model)
    elif name in BY_NAME:
        model = BY_NAME[name].build()
        model.set_attn_implementation("headwise")
    else:
        config = getattr(transformers, f"{name}{'Text' if name == 'Gemma4' else ''}Config")(
            **_SIZES | SIZES.get(name, {})
        )
        model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="headwise")
        stir(model)
    return model.to(dtype).eval()


NAMES = (
    "Llama GQA", "Mistral window", "Mixtral", "Qwen2", "Qwen3", "Gemma2 softcap", "Apertus", "Glm", "Phi-3", "GPT-NeoX",
    "Gemma3 text", "gpt-oss sinks", "Llama4 chunked", "OPT", "Cohere", "Cohere2", "Ernie4_5", "Exaone4", "Granite",
    "Helium", "HunYuanDenseV1", "ModernBertDecoder", "Nemotron", "Olmo2", "Persimmon", "Phi", "SmolLM3", "StableLm",
    "Starcoder2", "GPT-2", *ROPES,
)  # fmt: skip

OFTEN = ("Llama GQA", "Mistral window", "Gemma2 softcap", "Glm", "gpt-oss sinks", "Cohere", "Phi")


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_logits_of_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trouble() is None
    model = a_model(name)
    with collected() as attempt:

        def check(dtype: torch.dtype, kind: str, small: torch.dtype | None) -> None:
            text = prompt(3, padded=small is None)
            assert steps(monkeypatch, model.to(dtype), text, kind=kind, dtype=small) == 2 * 3  # two layers

        for case in ((torch.float32, "static", None), (torch.bfloat16, "paged", None)):
            attempt(case, check, *case)
        if name in OFTEN:
            attempt("int8", check, torch.float16, "static", torch.int8)


@torch.no_grad()
@pytest.mark.parametrize("shared", [0, 1])
def test_layers_that_share_their_keys_take_their_own_way(shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma's last layers read the keys of others, and the last of each kind keep theirs whole beside the cache."""
    with monkeypatch.context() as patch:
        patch.setitem(SIZES, "Gemma4", SIZES["Gemma4"] | {"num_kv_shared_layers": shared})
        model = a_model("Gemma4")
    layers = [layer.self_attn for layer in model.model.layers]
    own = [layer for layer in layers if not (layer.is_kv_shared_layer or layer.store_full_length_kv)]
    always = CACHE == "cache"  # since transformers 5.24 the last of each kind keep theirs also where nobody reads them
    assert len(own) == (1 if shared else 2 if always else 4)
    assert steps(monkeypatch, model, prompt(3, True)) == 3 * len(own)


@torch.no_grad()
@pytest.mark.parametrize(("name", "layers"), [("Whisper", 2), ("BART", 2), ("T5", 1)])
def test_the_decoder_beside_an_encoder(name: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own tokens; the encoder's keys are another cache's. T5's first layer makes the bias of the others."""
    model, sample = a_model(name), inputs(BY_NAME[name])
    read = {key: x for key, x in sample.items() if not key.startswith("decoder")}
    encoded = model.get_encoder()(**read)

    def run(model: PreTrainedModel, cache: Any, ids: torch.Tensor) -> list[torch.Tensor]:
        parts = ids[:, :4], *ids[:, 4:].split(1, dim=1)
        return [model(encoder_outputs=encoded, decoder_input_ids=x, **{CACHE: cache}).logits for x in parts]

    assert steps(monkeypatch, model, {"ids": sample["decoder_input_ids"]}, run) == layers * 3


@torch.no_grad()
def test_a_decoder_made_of_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.BertConfig(**_SIZES, is_decoder=True)
    model = transformers.BertLMHeadModel._from_config(config, attn_implementation="headwise").eval()
    stir(model)
    assert steps(monkeypatch, model, prompt(2, True)) == 2 * 3


@torch.no_grad()
def test_generation_and_rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model("Llama GQA")
    assert steps(monkeypatch, model, prompt(2), generated) == 2 * 3  # the first token is the prompt's
    assert steps(monkeypatch, model, prompt(2), kind="paged") == 2 * 3


def test_what_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of other code, attentions, probes, and a rotation that somebody has replaced."""
    model = a_model("Llama GQA")
    file = importlib.import_module(type(model).__module__)
    text = prompt(1)
    with torch.no_grad():
        assert steps(monkeypatch, a_model("DeepSeek-V3"), text) == 0  # keys are made anew from what is cached
        assert steps(monkeypatch, model, text) == 6
        assert steps(monkeypatch, model.train(), text) == 0
        model.eval()
        with headwise.hf.probe(model):
            assert steps(monkeypatch, model, text) == 0
        with monkeypatch.context() as patch:
            theirs = file.apply_rotary_pos_emb
            patch.setattr(file, "apply_rotary_pos_emb", lambda *args, **kwargs: theirs(*args, **kwargs))
            assert steps(monkeypatch, model, text) == 0
        out = model(**text, **{CACHE: (cache := make_cache(model))})
        more = model(torch.tensor([[5]]), **{CACHE: cache}, output_attentions=True)
        assert more.attentions[0].shape == (1, 4, 1, 13) and out.logits.shape[1] == 12
    with_gradient = model(torch.tensor([[5]]), **{CACHE: make_cache(model)})
    assert with_gradient.logits.requires_grad


_LLAMA = importlib.import_module("transformers.models.llama.modeling_llama")
_FORWARD = "        cos, sin = position_embeddings\n"
_INTERFACE = "        attention_interface: Callable ="
_OUT = "        attn_output = self.o_proj(attn_output)\n"


def changed(*passages: tuple[str, str]) -> Any:
    """The `forward` of Llama's attention, in a file of which some passages read otherwise."""
    source, name = "".join(linecache.getlines(str(_LLAMA.__file__))), f"<changed {passages}>"
    for old, new in passages:
        assert old in source
        source = source.replace(old, new)
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    names = dict(vars(_LLAMA)) | {"__name__": "changed"}
    only = "def rotate_half", "def apply_rotary_pos_emb", "class LlamaAttention"
    for part in only:  # the rest of the file stays as it is
        start = source.index(part)
        end = min(n for n in (source.find(f"\n{word}", start) for word in ("@", "def ", "class ")) if n > 0)
        padding = "\n" * source.count("\n", 0, start)
        exec(compile(padding + source[start:end], name, "exec"), names)
    return names["LlamaAttention"].forward


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("update(key_states, value_states", "update(value_states, key_states"),
        (f"{CACHE}.update(", f"{CACHE}.append("),
        (_INTERFACE, "        query_states = 2 * query_states\n" + _INTERFACE),
        (_OUT, _OUT + "        attn_output = attn_output + key_states.mean()\n"),
        (_INTERFACE, "        if key_states.ndim > 9:\n            value_states = 2 * value_states\n" + _INTERFACE),
        ("attn_output, attn_weights = attention_interface(", "attn_output = attention_interface("),
        ("            query_states,\n            key_states,", "            key_states,\n            query_states,"),
    ],
)  # fmt: skip
def test_other_code_is_not_prepared(old: str, new: str) -> None:
    """A forward is taken over only where what it does from rotation to attention reads like what is known."""
    assert decoding.stepping(changed())[0] is not None
    assert decoding.stepping(changed((old, new))) == (None, None)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("q_embed = (q * cos) + (rotate_half(q) * sin)", "q_embed = (q * cos) - (rotate_half(q) * sin)"),
        ("torch.cat((-x2, x1), dim=-1)", "torch.cat((x2, -x1), dim=-1)"),
        ("key_states, cos, sin)\n", "key_states, cos, sin)\n        query_states = self.q_norm(query_states)\n"),
        ("(query_states, key_states, cos, sin)", "(query_states, key_states, sin, cos, unsqueeze_dim=2)"),
    ],
)
def test_another_rotation_is_left_to_the_model(old: str, new: str) -> None:
    """Then a step is what comes after it."""
    known, _ = decoding.stepping(changed())
    other, _ = decoding.stepping(changed((old, new)))
    assert known is not None and known.rotation == decoding.Rotation()
    assert other is not None and other.rotation is None


@torch.no_grad()
def test_what_stands_around_is_the_class_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code before rotation and after attention may be any: it runs as it is."""
    model = a_model("Llama GQA")
    plain = decoded(model, make_cache(model), **prompt(2))
    decoding._prepare.cache_clear()
    try:
        with monkeypatch.context() as patch:
            other = "        query_states = 3 * query_states\n", _OUT.replace("self.o", "2 * self.o")
            patch.setattr(_LLAMA.LlamaAttention, "forward", changed((_FORWARD, other[0] + _FORWARD), (_OUT, other[1])))
            assert steps(monkeypatch, model, prompt(2)) == 6
            assert not torch.equal(decoded(model, make_cache(model), **prompt(2))[-1], plain[-1])
    finally:
        decoding._prepare.cache_clear()


@torch.no_grad()
def test_a_layer_that_does_not_cache_takes_no_step() -> None:
    """Where the code asks more than whether there is a cache, a step is asked with the cache only if that is so."""
    seen: list[Any] = []

    def step(*args: Any, **options: Any) -> torch.Tensor:
        seen.append(args[3])
        return torch.zeros(1, 1, 4, 6)

    condition = f"{CACHE} is not None:\n            key"
    forward = changed((condition, condition.replace("None:", "None and self.layer_idx > 0:")))
    forward, _ = syntax.without_renaming(forward)
    core = syntax.core_of(syntax.syntax_of(forward))
    assert core is not None
    made, cache = syntax.with_steps(forward, core, True, step), object()
    for layer in a_model("Llama GQA").model.layers:
        made(layer.self_attn, torch.randn(1, 1, 28), (None, None), None, **{CACHE: cache})
    assert seen == [None, cache]


def test_attention_in_the_other_way_of_an_if() -> None:
    """GPT-2's: there is no step where the first way is taken, and what its test reads is written down before."""
    forward: Any = importlib.import_module("transformers.models.gpt2.modeling_gpt2").GPT2Attention.forward
    forward = inspect.unwrap(forward)  # before it was prepared, and without transformers' decorators
    core = syntax.core_of(syntax.syntax_of(forward))
    assert core is not None
    assert "using_eager and self.reorder_and_upcast_attn" in map(ast.unparse, core.unless)
    assert [ast.unparse(core.function.body[n]).split()[0] for n in core.noted] == ["using_eager"]


@pytest.mark.unchecked
@pytest.mark.parametrize(
    ("passages", "missing"),
    [
        (
            [(f"{CACHE}.update(key_states, value", f"{CACHE}.update(value_states, value")],
            r"no statement reads `if WHEN: K, V = CACHE",
        ),
        (
            [("attn_output, attn_weights = attention_i", "attn_output = attention_i")],
            r"no statement reads `OUT, WEIGHTS = ",
        ),
        ([(_INTERFACE, "        query_states = 2 * query_states\n" + _INTERFACE)], "between cache and attention"),
    ],
)
def test_a_class_whose_code_has_changed_is_told_of_once(
    passages: list[tuple[str, str]], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_LLAMA.LlamaAttention, "forward", changed(*passages))
    decoding._prepare.cache_clear()
    model = a_model("Llama GQA")
    try:
        with pytest.warns(UserWarning, match=f"^LlamaAttention decodes .* in transformers 5.*, {missing}") as warned:
            make_cache(model), make_cache(model)
        assert len(warned) == 1 and "\n" not in str(warned[0].message)
    finally:
        decoding._prepare.cache_clear()


def test_classes_that_never_take_steps_are_not_told_of() -> None:
    """Those named as such, cross-attention, and classes of other code; a decorator that is not known is told of."""
    model = a_model("DeepSeek-V3")
    owner = type(model.model.layers[0].self_attn)
    make_cache(model)  # warnings are errors
    decoding._report(owner, owner.forward)
    decoding._report(type("MyCrossAttention", (owner,), {}), owner.forward)
    decoding._report(torch.nn.Linear, torch.nn.Linear.forward)
    with pytest.warns(UserWarning, match="MyAttention decodes .* its forward is decorated or replaced"):
        decoding._report(type("MyAttention", (owner,), {}), decoding.wraps(owner.forward)(lambda *args: None))


def test_functions_without_a_text() -> None:
    def forward(self: Any, hidden_states: Any) -> Any:
        return hidden_states

    assert decoding.stepping(forward) == (None, None)
    assert decoding.stepping(None) == (None, None)
    theirs, _ = syntax.without_renaming(changed())
    assert decoding.stepping(decoding.wraps(theirs)(lambda *args, **kwargs: None)) == (None, None)
    blind = FunctionType(theirs.__code__.replace(co_filename="<nowhere>"), theirs.__globals__)
    assert decoding.stepping(blind) == (None, None)


def test_what_a_step_does_to_scores() -> None:
    scores = decoding._scores_of(dropout=0.0, scaling=0.5, softcap=3.0, position_ids=1, use_cache=True, seq_idx=None)
    assert scores == decoding.Scores(0.5, 3.0, None)
    for other in ({"dropout": 0.1}, {"output_attentions": True}, {"softcap": 0.0}, {"seq_idx": 1}, {"other": 1}):
        assert decoding._scores_of(**other) is None


def test_angles_that_do_not_fit() -> None:
    query, pair = torch.randn(3, 2, 1, 8), (torch.randn(1, 1, 8), torch.randn(1, 1, 8))
    plain, part, wide = decoding.Rotation(), decoding.Rotation(partly=True), decoding.Rotation(wide=True)
    half = tuple(x[..., :4] for x in pair)
    assert decoding.turn_of(pair, query, plain, None).size == 8
    assert decoding.turn_of(half, query, part, None).size == decoding.turn_of(half, query, plain, 4).size == 4
    assert decoding.turn_of(pair, query.bfloat16(), wide, None).cos.dtype == torch.float32
    for angles, x, turning, size in (
        (half, query, plain, None), (pair, query, plain, 4), (pair, query.bfloat16(), plain, None),
        (tuple(y.expand(2, 1, 8) for y in pair), query, plain, None), ((pair[0], half[0]), query, plain, None),
        (tuple(y.expand(1, 2, 8) for y in pair), query, plain, None), ((pair[0], None), query, plain, None),
    ):  # fmt: skip
        assert decoding.turn_of(angles, x, turning, size) is None

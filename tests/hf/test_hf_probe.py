"""The probe sees every attention call by module and order, says when it does not, and leaves no trace."""

from __future__ import annotations

import copy
import re
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import transformers
from hf_measure import counted
from hf_models import BY_NAME, OUTSIDE, PAD, ROWS, B, Row, T, inputs, logits, padding, token_ids
from torch import nn
from transformers import PreTrainedModel

import headwise
import headwise.hf as hf
import headwise.nn as hw_nn
from headwise.hf.models.support import attention_modules, configs, require_interface
from headwise.ops.statistics.weights import weights


def state_of(model: nn.Module) -> dict[str, Any]:
    """All that a probe might leave behind, by value: tensors, hooks, attributes, configs."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    modules = {
        name: (
            module.training,
            sorted(vars(module)),
            *(len(hooks) for key, hooks in vars(module).items() if key.endswith("_hooks")),
            "forward" in vars(module),
        )
        for name, module in model.named_modules()
    }
    return {
        "tensors": {name: (x.data_ptr(), x.clone(), x.requires_grad) for name, x in tensors.items()},
        "modules": modules,
        "configs": [(id(config), config._attn_implementation, config.to_dict()) for config in configs(model)],
    }


def assert_same_state(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before["modules"] == after["modules"] and before["configs"] == after["configs"]
    assert before["tensors"].keys() == after["tensors"].keys()
    for name, (place, value, grad) in before["tensors"].items():
        assert (place, grad) == after["tensors"][name][::2] and torch.equal(value, after["tensors"][name][1])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_call_of_every_kind_of_model_is_seen(row: Row) -> None:
    model, arguments = row.build(), inputs(row)
    expected = logits(model, arguments)
    before = state_of(model)
    with hf.probe(model) as seen:
        out = logits(model, arguments)
    assert_same_state(before, state_of(model))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(logits(model, arguments), expected), "eager again, to the bit"

    assert [call.order for call in seen.calls] == list(range(row.calls))
    names = [call.module for call in seen.calls]
    assert set(names) == set(attention_modules(model))
    assert len(set(names)) == (1 if row.name == "ALBERT" else row.calls)
    for call in seen.calls:
        assert isinstance(model.get_submodule(call.module), nn.Module)
        assert call.query.shape[0] == call.key.shape[0] == B and call.query.shape[1] == 4
        assert call.query.shape[3] == call.key.shape[3] and call.value.shape[:3] == call.key.shape[:3]


@pytest.mark.parametrize("name", ["Llama GQA", "gpt-oss sinks", "Gemma2 softcap", "Llama4 chunked", "BERT", "T5"])
def test_what_is_seen_gives_the_models_own_weights(name: str) -> None:
    """From a call alone, the weights that eager returns: nothing that shapes them is missing."""
    row = BY_NAME[name]
    model, arguments = row.build(), inputs(row, "right")
    with torch.no_grad():
        out = model(**arguments, output_attentions=True)
    if row.kind == "seq2seq":
        pairs = zip(out.decoder_attentions, out.cross_attentions, strict=True)
        eager = [*out.encoder_attentions, *(x for pair in pairs for x in pair)]
    else:
        eager = list(out.attentions)
    with hf.probe(model) as seen:
        logits(model, arguments)
    for call, theirs in zip(seen.calls, eager, strict=True):
        ours = weights(call.query, call.key, **call.scoring)
        real = padding("right", ours.shape[2]).bool()[:, None, :, None]  # eager's rows of padding are a mean, ours 0
        torch.testing.assert_close(ours * real, theirs * real, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["Llama GQA", "DeepSeek-V3", "T5"])
def test_what_is_seen_gives_what_the_attention_gave(name: str) -> None:
    """From keys, values and the rest of a call, the input of the output projection."""
    model, arguments = BY_NAME[name].build(), inputs(BY_NAME[name], "right")
    outs: list[Any] = []
    with ExitStack() as hooks, hf.probe(model) as seen:
        for module in attention_modules(model).values():
            last = list(module.children())[-1] if not hasattr(module, "o") else module.o
            hooks.callback(last.register_forward_pre_hook(lambda _, args: outs.append(args[0])).remove)
        logits(model, arguments)
    for call, out in zip(seen.calls, outs, strict=True):
        options = dict(mask=call.mask, scale=call.scale, softcap=call.softcap, sinks=call.sinks)
        ours = headwise.attention(call.query, call.key, call.value, **options)
        assert torch.equal(ours.transpose(1, 2).flatten(2), out)


def test_calls_can_be_streamed_and_are_not_kept() -> None:
    model = BY_NAME["Llama GQA"].build()
    got: list[str] = []
    with hf.probe(model, lambda call: got.append(call.module)) as seen:
        logits(model, inputs(BY_NAME["Llama GQA"]))
    assert got == ["model.layers.0.self_attn", "model.layers.1.self_attn"] and seen.calls == []


def test_the_general_probe_finds_this_one() -> None:
    model = BY_NAME["BERT"].build()
    with hw_nn.probe(model) as seen:
        logits(model, inputs(BY_NAME["BERT"]))
    assert len(seen.calls) == 2


def test_every_step_of_a_generation_is_seen() -> None:
    model = BY_NAME["Llama GQA"].build()
    with hf.probe(model) as seen:
        model.generate(token_ids(), max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=PAD)
    assert [call.query.shape[2] for call in seen.calls] == [T, T, 1, 1, 1, 1]
    assert [call.key.shape[2] for call in seen.calls] == [T, T, T + 1, T + 1, T + 2, T + 2]


def test_a_model_already_on_headwise_stays_there() -> None:
    model = BY_NAME["T5"].build()
    model.set_attn_implementation("headwise")
    with hf.probe(model):
        logits(model, inputs(BY_NAME["T5"]))
    assert {config._attn_implementation for config in configs(model)} == {"headwise"}


def test_training_mode_and_gradients_are_left_alone() -> None:
    model = BY_NAME["Llama GQA"].build().train()
    with hf.probe(model) as seen:
        model(token_ids()).logits.sum().backward()
    assert model.training and seen.calls[0].query.grad_fn is not None
    assert all(p.grad is not None for p in model.parameters())


def test_probes_nest_and_keep_to_their_model() -> None:
    one, other = BY_NAME["Llama GQA"].build(), BY_NAME["GPT-2"].build()
    with hf.probe(one) as outer, hf.probe(other) as beside, hf.probe(one) as inner:
        logits(one, inputs(BY_NAME["Llama GQA"]))
        logits(other, inputs(BY_NAME["GPT-2"]))
    assert len(outer.calls) == len(inner.calls) == len(beside.calls) == 2
    assert {call.module for call in beside.calls} == {"transformer.h.0.attn", "transformer.h.1.attn"}
    assert one.config._attn_implementation == other.config._attn_implementation == "eager"
    with counted() as calls:
        logits(one, inputs(BY_NAME["Llama GQA"]))
    assert calls == []


@pytest.mark.unchecked
def test_a_compiled_model_is_seen_too() -> None:
    model = BY_NAME["Llama GQA"].build()
    model.compile(backend="eager")
    with hf.probe(model) as seen:
        logits(model, inputs(BY_NAME["Llama GQA"]))
    assert len(seen.calls) == 2


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Llama GQA", "gpt-oss sinks", "DeepSeek-V3", "BERT", "T5", "OPT"])
def test_what_each_returns_takes_the_place_of_the_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of transformers is made inside; the own attention is not computed; the model is as it was."""
    model, arguments = BY_NAME[name].build(), inputs(BY_NAME[name], "right")
    before = state_of(model)
    with hf.probe(model) as seen:
        expected = logits(model, arguments)
    ran: list[str] = []
    own = headwise.hf.returned.attention
    monkeypatch.setattr("headwise.hf.returned.attention", lambda *a, **k: ran.append("own") or own(*a, **k))
    with hf.probe(model, lambda call: call.attend()):
        assert torch.equal(logits(model, arguments), expected) and ran == []
    first = seen.calls[0].module
    with hf.probe(model, lambda call: None if call.module == first else call.attend()):
        assert torch.equal(logits(model, arguments), expected) and ran == ["own"]
    without = torch.ones(4, 1, 1).index_fill(0, torch.tensor(1), 0.0)
    with hf.probe(model, lambda call: without * call.attend()) as changed:
        assert not torch.allclose(logits(model, arguments), expected, atol=1e-3) and changed.calls == []
    assert_same_state(before, state_of(model))


def test_gradients_flow_through_an_answer_and_the_last_opened_has_its_way() -> None:
    model, gate = BY_NAME["Llama GQA"].build(), torch.ones(4, 1, 1, requires_grad=True)
    with hf.probe(model, lambda call: 0 * call.attend()), hf.probe(model, lambda call: gate * call.attend()):
        out = model(token_ids()).logits
    with hf.probe(model, lambda call: call.attend()), hf.probe(model, lambda call: None):
        torch.testing.assert_close(out, model(token_ids()).logits, rtol=0, atol=0)
    (grad,) = torch.autograd.grad(out.square().sum(), gate)
    assert grad.shape == (4, 1, 1) and bool((grad != 0).all())


@pytest.mark.unchecked
def test_an_answer_that_does_not_fit_is_refused() -> None:
    model = BY_NAME["Llama GQA"].build()
    text = "of module 'model.layers.0.self_attn': (B, H, T, V) = (3, 4, 11, 6), torch.float32 on cpu"
    with (
        pytest.raises(ValueError, match=re.escape(text)),
        hf.probe(model, lambda call: call.attend().transpose(1, 2)),
    ):
        logits(model, inputs(BY_NAME["Llama GQA"]))
    assert model.config._attn_implementation == "eager"


# -- faults -----------------------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


@pytest.mark.parametrize("name", ["Llama GQA", "T5", "CLIP"])
def test_after_an_exception_the_model_is_as_it_was(name: str) -> None:
    row = BY_NAME[name]
    model = row.build()
    before = state_of(model)

    def boom(call: hw_nn.AttentionCall) -> None:
        raise Boom

    with pytest.raises(Boom), hf.probe(model, boom):
        logits(model, inputs(row))
    assert_same_state(before, state_of(model))
    with pytest.raises(Boom), hf.probe(model):
        raise Boom
    assert_same_state(before, state_of(model))


def skipping(model: PreTrainedModel) -> PreTrainedModel:
    """A model whose second layer lets its input pass."""
    model.model.layers[1].forward = lambda hidden_states, *args, **kwargs: hidden_states
    return model


def test_a_module_that_is_not_called_is_named() -> None:
    model = skipping(BY_NAME["Llama GQA"].build())
    text = (
        "LlamaForCausalLM (model_type 'llama'): module 'model.layers.1.self_attn' was not called while the probe was "
        "open; run the whole model inside the with block"
    )
    with pytest.raises(hf.ModelError, match=re.escape(text)), hf.probe(model):
        logits(model, inputs(BY_NAME["Llama GQA"]))
    assert model.config._attn_implementation == "eager"


def test_a_module_that_computes_attention_itself_is_named_at_once() -> None:
    model = BY_NAME["Llama GQA"].build()
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    text = "module 'model.layers.1.self_attn' ran without calling the attention function it is set to"
    with pytest.raises(hf.ModelError, match=re.escape(text)), hf.probe(model):
        logits(model, inputs(BY_NAME["Llama GQA"]))


def test_a_probe_that_saw_nothing_says_so() -> None:
    model = BY_NAME["BART"].build()
    text = r"BartForConditionalGeneration .* module 'model.encoder.layers.0.self_attn' \(and 5 more attention modules\)"
    with pytest.raises(hf.ModelError, match=text), hf.probe(model):
        pass


def test_a_part_of_a_model_may_run_alone() -> None:
    bart, clip = BY_NAME["BART"].build(), BY_NAME["CLIP"].build()
    with hf.probe(bart) as seen:
        bart.get_encoder()(token_ids())
    assert [call.module for call in seen.calls] == [
        "model.encoder.layers.0.self_attn",
        "model.encoder.layers.1.self_attn",
    ]
    with hf.probe(clip) as seen, torch.no_grad():
        clip.get_text_features(input_ids=token_ids(), attention_mask=padding("none"))
    assert len(seen.calls) == 2


def test_cross_attention_without_a_memory_is_not_missed() -> None:
    """But with a memory it is: one cross-attention that is skipped where others run is named."""
    sizes = BY_NAME["GPT-2"].sizes | dict(add_cross_attention=True)
    model = Row("GPT-2 cross", "GPT2LMHeadModel", "GPT2Config", 4, sizes=sizes).build()
    with hf.probe(model) as seen:
        model(token_ids())
    assert [call.module for call in seen.calls] == ["transformer.h.0.attn", "transformer.h.1.attn"]
    with hf.probe(model) as seen:
        model(token_ids(), encoder_hidden_states=torch.randn(B, 5, 28))
    assert len(seen.calls) == 4 and seen.calls[1].key.shape[2] == 5
    model.transformer.h[1].forward = lambda hidden_states, *args, **kwargs: hidden_states
    text = r"module 'transformer.h.1.attn' \(and 1 more attention modules\) was not called"
    with pytest.raises(hf.ModelError, match=text), hf.probe(model):
        model(token_ids(), encoder_hidden_states=torch.randn(B, 5, 28))


def test_a_closed_probe_sees_no_more() -> None:
    model = BY_NAME["Llama GQA"].build()
    with hf.probe(model) as seen:
        logits(model, inputs(BY_NAME["Llama GQA"]))
    model.set_attn_implementation("headwise")
    logits(model, inputs(BY_NAME["Llama GQA"]))
    assert len(seen.calls) == 2


@pytest.mark.parametrize("model_type", OUTSIDE)
def test_a_model_outside_the_interface_is_refused(model_type: str) -> None:
    model, config, sizes = OUTSIDE[model_type]
    built = getattr(transformers, model)._from_config(getattr(transformers, config)(**sizes))
    before = state_of(built)
    text = (
        f"{model} (model_type '{model_type}') is not on transformers' attention interface, so its heads cannot be seen"
    )
    with pytest.raises(hf.ModelError, match=re.escape(text)) as caught, hf.probe(built):
        raise AssertionError("the block must not run")
    assert 'use attn_implementation="eager" with output_attentions=True in transformers' in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_same_state(before, state_of(built))


def test_the_refusal_does_not_hang_on_the_table_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.hf.models.support.OUTSIDE", {})
    for model, config, sizes in OUTSIDE.values():
        built = getattr(transformers, model)._from_config(getattr(transformers, config)(**sizes))
        with pytest.raises(hf.ModelError, match="its attention is code of its own"), hf.probe(built):
            pass


def test_the_table_of_names_names_what_is_outside() -> None:
    """Every model_type in it exists, and transformers says that it cannot be switched; of some it is wrong."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    from headwise.hf.models.architectures import OUTSIDE as NAMES
    from headwise.hf.models.architectures import SPARSE

    for model_type in NAMES:
        assert model_type in CONFIG_MAPPING_NAMES, model_type
        name = MODEL_MAPPING_NAMES.get(model_type)
        if isinstance(name, str) and hasattr(transformers, name):
            can_be = getattr(transformers, name)._can_set_attn_implementation()
            assert can_be == (model_type in ("bridgetower", "informer", "kosmos-2")), model_type
    assert not NAMES.keys() & SPARSE.keys()


def test_attention_beside_the_interface_is_warned_of() -> None:
    """A pooling head with attention of its own: the rest of the model can be looked at all the same."""
    config = transformers.SiglipVisionConfig(
        hidden_size=28, num_hidden_layers=2, num_attention_heads=4, intermediate_size=17, image_size=12, patch_size=4
    )
    model = transformers.SiglipVisionModel(config).eval()
    text = r"1 module\(s\) of attention outside .*SiglipMultiheadAttentionPoolingHead"
    with pytest.warns(UserWarning, match=text), hf.probe(model) as seen, torch.no_grad():
        model(pixel_values=torch.randn(B, 3, 12, 12))
    assert len(seen.calls) == 2


@pytest.mark.unchecked
def test_what_is_no_transformers_model_is_refused() -> None:
    text = r"takes a transformers PreTrainedModel, got Linear; .* use headwise.nn.probe"
    with pytest.raises(TypeError, match=text), hf.probe(nn.Linear(2, 3)):
        pass


def test_a_copy_of_a_model_is_another_model() -> None:
    model = BY_NAME["Llama GQA"].build()
    twin = copy.deepcopy(model)
    with hf.probe(model) as seen:
        logits(twin, inputs(BY_NAME["Llama GQA"]))
        assert seen.calls == []
        logits(model, inputs(BY_NAME["Llama GQA"]))
    assert len(seen.calls) == 2
    assert headwise.nn is hw_nn


def test_configs_inside_of_configs_are_all_switched() -> None:
    """Also one that no module holds itself: masks are made for it by whoever holds the outer one."""
    holder = nn.Module()
    holder.config = transformers.CLIPConfig()
    assert {type(config).__name__ for config in configs(holder)} == {"CLIPConfig", "CLIPTextConfig", "CLIPVisionConfig"}
    assert len(configs(nn.Sequential(holder, holder, nn.Linear(2, 2)))) == 3


def test_sparse_attention_is_refused_by_name() -> None:
    """transformers has it on the interface, but with an argument that changes the result: the keys each query picks."""
    text = "DeepseekV32ForCausalLM (model_type 'deepseek_v32') is not on transformers' attention interface"
    with pytest.raises(hf.ModelError, match=re.escape(text) + r".* it picks single keys for each query"):
        require_interface(transformers.DeepseekV32ForCausalLM, "deepseek_v32")

"""Direct logit attribution against the parts of the residual stream, taken by hooks, and the weights themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hf_models import BY_NAME, stir
from test_circuits import Small
from torch import Tensor, nn

from headwise.look import attribute, circuits

TEXT = [1, 7, 23, 11, 5, 7, 31, 2, 47, 23, 11]
ANSWER, WRONG = 17, 29
PARTS = {
    "GPT-2": ("transformer.h", "attn.c_proj", "mlp", "transformer.drop", "transformer.ln_f"),
    "Llama GQA": ("model.layers", "self_attn.o_proj", "mlp", "model.embed_tokens", "model.norm"),
}


@torch.no_grad()
def parts_of(name: str) -> tuple[list[list[Tensor]], Tensor, Any]:
    """What each head of each layer adds to the residual stream, all else, and the straight way to the difference."""
    model = BY_NAME[name].build().eval()
    blocks, projection, mlp, embed, norm = PARTS[name]
    kept: dict[str, Tensor] = {}
    hooks = []
    for n in range(model.config.num_hidden_layers):
        into, out = (model.get_submodule(f"{blocks}.{n}.{part}") for part in (projection, mlp))
        hooks.append(into.register_forward_pre_hook(lambda _, x, n=n: kept.update({f"z{n}": x[0][0, -1]})))  # type: ignore[misc]
        hooks.append(out.register_forward_hook(lambda *x, n=n: kept.update({f"mlp{n}": x[2][0, -1]})))  # type: ignore[misc]
    hooks.append(model.get_submodule(embed).register_forward_hook(lambda *x: kept.update(embed=x[2][0, -1])))
    final = model.get_submodule(norm)
    hooks.append(final.register_forward_pre_hook(lambda _, x: kept.update(residual=x[0][0, -1])))
    model(torch.tensor([TEXT]))
    for hook in hooks:
        hook.remove()
    heads, rest = [], kept["embed"]
    for n in range(model.config.num_hidden_layers):
        into = model.get_submodule(f"{blocks}.{n}.{projection}")
        matrix = into.weight if name == "GPT-2" else into.weight.mT  # (H * V, M)
        split = kept[f"z{n}"].chunk(model.config.num_attention_heads)
        rows = matrix.chunk(model.config.num_attention_heads)
        heads.append([z @ W for z, W in zip(split, rows, strict=True)])
        rest = rest + kept[f"mlp{n}"] + (0.0 if into.bias is None else into.bias)
    residual, direction = kept["residual"], model.lm_head.weight[ANSWER] - model.lm_head.weight[WRONG]

    @torch.no_grad()
    def straight(x: Tensor) -> float:
        """The final norm with the scale of the whole residual stream, without its bias."""
        if isinstance(final, nn.LayerNorm):
            centred = (x - x.mean()) * (residual.var(correction=0) + final.eps).rsqrt() * final.weight
        else:
            centred = x * (residual.square().mean() + final.variance_epsilon).rsqrt() * final.weight
        return float(centred @ direction)

    constant = 0.0 if getattr(final, "bias", None) is None else float(final.bias @ direction)
    return heads, rest, (straight, constant, model)


@pytest.mark.parametrize("name", PARTS)
def test_heads_and_all_else_sum_to_the_difference(name: str) -> None:
    heads, rest, (straight, constant, model) = parts_of(name)
    found = attribute(model, torch.tensor([TEXT]), ANSWER, WRONG)
    with torch.no_grad():
        logits = model(torch.tensor([TEXT])).logits[0, -1]
    assert found.difference == pytest.approx(float(logits[ANSWER] - logits[WRONG]), abs=1e-5)
    assert [(one.layer, one.head) for one in found.heads] == [
        (n, h) for n, row in enumerate(heads) for h in range(len(row))
    ]
    for one in found.heads:
        assert one.effect == pytest.approx(straight(heads[one.layer][one.head]), abs=1e-5)
    assert found.rest == pytest.approx(straight(rest) + constant, abs=3e-5)
    assert sum(one.effect for one in found.heads) + found.rest == pytest.approx(found.difference, abs=1e-6)
    assert max(abs(one.effect) for one in found.heads) > 1e-3


def test_it_prints_the_heads_of_the_largest_effect() -> None:
    model = BY_NAME["Llama GQA"].build()
    found = attribute(model, TEXT, ANSWER, WRONG, decode=lambda token: f"<{token}>", name="m")
    best = max(found.heads, key=lambda one: abs(one.effect or 0))
    assert (found.answer, found.tokens[1]) == ("<17>", "<7>")
    assert f"{best.effect:+.3f}" in str(found) and f"together {found.difference:+.3f}" in str(found)


@pytest.mark.parametrize(
    ("name", "answer", "text"),
    [
        ("Llama GQA", 9999, "direct attribution needs heads that reach the logits of ids 9999 and 29 by addition"),
        ("BERT", 17, "headwise.look.patch measures any model"),
    ],
)
def test_models_without_a_direct_way_are_refused(name: str, answer: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        attribute(BY_NAME[name].build(), TEXT, answer, WRONG)


@pytest.mark.unchecked
def test_a_part_that_is_not_linear_has_no_direct_way() -> None:
    model = Small()
    model.final = nn.Tanh()
    with pytest.raises(ValueError, match=r"module 'final', .* is no norm, so heads have no direct .*look\.patch"):
        attribute(model, TEXT, ANSWER, WRONG)
    model = Small()
    model.layers[1].o_proj = nn.Sequential(nn.Tanh(), model.layers[1].o_proj)
    with pytest.raises(ValueError, match=r"no module reads the heads of 'layers\.1' side by side .*look\.patch"):
        attribute(model, TEXT, ANSWER, WRONG)


@pytest.mark.parametrize("name", ["Cohere", "Granite"])
def test_a_factor_after_the_unembedding_counts(name: str) -> None:
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 13, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 3, "num_key_value_heads": 1, "pad_token_id": 0}
    torch.manual_seed(7)
    if name == "Cohere":
        model: Any = transformers.CohereForCausalLM(transformers.CohereConfig(**sizes, logit_scale=0.25))
    else:
        model = transformers.GraniteForCausalLM(transformers.GraniteConfig(**sizes, logits_scaling=5.0))
    stir(model)
    found = attribute(model.eval(), TEXT, ANSWER, WRONG)
    with torch.no_grad():
        logits = model(torch.tensor([TEXT])).logits[0, -1]
        unscaled = model.lm_head(model.model(torch.tensor([TEXT])).last_hidden_state)[0, -1]
    assert found.difference == pytest.approx(float(logits[ANSWER] - logits[WRONG]), abs=1e-5)
    assert abs(found.difference - float(unscaled[ANSWER] - unscaled[WRONG])) > 1e-2
    assert sum(one.effect or 0 for one in found.heads) + found.rest == pytest.approx(found.difference, abs=1e-6)


def test_the_heads_records_have_the_factor_too() -> None:
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 13, "num_hidden_layers": 2}
    one, other = (
        transformers.CohereForCausalLM(
            transformers.CohereConfig(**sizes, num_attention_heads=3, pad_token_id=0, logit_scale=factor)
        ).eval()
        for factor in (1.0, 0.25)
    )
    stir(one)
    other.load_state_dict(one.state_dict())
    whole, quarter = ([head.logit for head in circuits(model, TEXT).heads] for model in (one, other))
    assert max(abs(logit) for logit in whole if logit is not None) > 1e-2
    assert quarter == pytest.approx([0.25 * (logit or 0.0) for logit in whole], abs=1e-6)


@pytest.mark.unchecked
@pytest.mark.parametrize("name", ["answer", "wrong"])
@pytest.mark.parametrize(("value", "error"), [(-3, ValueError), (2.5, TypeError), (True, TypeError)], ids=str)
def test_either_token_is_checked(name: str, value: Any, error: type[Exception]) -> None:
    """A negative id would be that of another token, counted from the end."""
    arguments: dict[str, Any] = {"answer": ANSWER, "wrong": WRONG, name: value}
    with pytest.raises(error, match=f"^{name} is "):
        attribute(Small(), TEXT, **arguments)

"""Circuits: matrices of heads against the weights, compositions against whole products, writes against the logits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hf_models import _GQA, BY_NAME, Row
from torch import Tensor, nn

import headwise
from headwise.look import Circuits, circuits
from headwise.look.interventions.losses import readings
from headwise.look.weights.attribution import ending_of
from headwise.look.weights.composition import compositions
from headwise.look.weights.head_matrices import Matrices, matrices
from headwise.nn import MultiHeadAttention, Rotary, probe
from headwise.testing.constructed import constructed

TEXT = [1, 7, 23, 11, 5, 7, 31, 2, 47, 23, 11]


def measured(model: nn.Module, text: list[int] = TEXT) -> list[Matrices]:
    [reading] = readings(model, [text], loss=lambda out, ids: ids, mask_id=None, seed=0)
    return matrices(model, reading)


class Small(nn.Module):
    """Attention alone, with layer norms before it and at the end, biases everywhere; logits of 53 words."""

    def __init__(self, norm: Any = nn.LayerNorm, layers: int = 3, *, behind: bool = False) -> None:
        super().__init__()
        self.behind = nn.ModuleList(norm(24) if behind else nn.Identity() for _ in range(layers))
        self.embed = nn.Embedding(53, 24)
        self.norms = nn.ModuleList(norm(24) for _ in range(layers))
        self.layers = nn.ModuleList(
            MultiHeadAttention(24, 4, num_kv_heads=2, head_dim=6, value_dim=5, bias=True, rotary=Rotary(6))
            for _ in range(layers)
        )
        self.final, self.unembed = norm(24), nn.Linear(24, 53)
        with torch.no_grad():
            for p in self.parameters():
                p.add_(
                    torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
                    * (0.4 if p.ndim < 2 else 0.1)
                )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for norm, layer, behind in zip(self.norms, self.layers, self.behind, strict=True):
            x = x + behind(layer(norm(x), mask=headwise.causal()))
        return self.unembed(self.final(x))


def weights_of(model: Small, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_Q, W_K, W_V (H, n, M) with the norm's weight and the removal of the mean, W_O (H, V, M)."""
    part, norm = model.layers[layer], model.norms[layer]
    fold = norm.weight.diag() @ (torch.eye(24) - torch.full((24, 24), isinstance(norm, nn.LayerNorm) / 24))
    q = part.q_proj.weight.unflatten(0, (4, 6)) @ fold
    k, v = (p.weight.unflatten(0, (2, -1)).repeat_interleave(2, 0) @ fold for p in (part.k_proj, part.v_proj))
    return tuple(x.detach() for x in (q, k, v, part.o_proj.weight.T.unflatten(0, (4, 5))))  # type: ignore[return-value]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_compositions_against_whole_products(norm: Any) -> None:
    model = Small(norm)
    layers = measured(model)
    assert [layer.norms for layer in layers] == [(f"norms.{n}", f"norms.{n}") for n in range(3)]
    for r, w in ((1, 0), (2, 0), (2, 1)):
        got = compositions(layers[r], layers[w])
        (Q, K, V, out), (_, _, V_w, out_w) = weights_of(model, r), weights_of(model, w)
        for a, b in itertools.product(range(4), repeat=2):
            QK, OV, OV_w = Q[a].T @ K[a], out[a].T @ V[a], out_w[b].T @ V_w[b]
            for kind, product, own in (("q", QK.T @ OV_w, QK), ("k", QK @ OV_w, QK), ("v", OV @ OV_w, OV)):
                assert float(got[kind][a, b]) == pytest.approx(
                    float(product.norm() / own.norm() / OV_w.norm()), rel=1e-4
                )


def test_chance_is_that_of_a_turned_residual_stream() -> None:
    """The root mean square over turns drawn at random, for spectra as uneven as these."""
    reader, writer = measured(Small())[1::-1]
    draw, total = torch.Generator().manual_seed(3), {kind: 0.0 for kind in "qkv"}
    for _ in range(300):
        turn = torch.linalg.qr(torch.randn(24, 24, generator=draw))[0]
        turned = Matrices(
            "", 0, writer.query, writer.key, writer.value, writer.output @ turn, writer.lengths, writer.norms
        )
        for kind, values in compositions(reader, turned).items():
            total[kind] += float(values.square().mean()) / 300
    for kind in "qkv":
        assert total[kind] ** 0.5 == pytest.approx(24**-0.5, rel=0.03), kind


def folded(norm: nn.Module, weight: Tensor) -> Tensor:
    centre = torch.eye(28) - 1 / 28 if isinstance(norm, nn.LayerNorm) else torch.eye(28)
    return weight @ norm.weight.diag() @ centre


@pytest.mark.parametrize("name", ["GPT-2", "Llama GQA", "GPT-NeoX", "Phi-3", "OPT", "T5"])
def test_matrices_are_the_weights(name: str) -> None:
    """Fused or not, one way round or the other; up to a factor, which no composition sees, and turned places."""
    model = BY_NAME[name].build().requires_grad_(False)
    layers = measured(model)
    if name == "GPT-2":
        block = model.transformer.h[1]
        q, k, v = (folded(block.ln_1, w.T) for w in block.attn.c_attn.weight.split(28, 1))
        o, K, layer = block.attn.c_proj.weight, 4, layers[1]
    elif name == "GPT-NeoX":
        block, K, layer = model.gpt_neox.layers[1], 4, layers[1]
        parts = block.attention.query_key_value.weight.unflatten(0, (4, 3, 8))
        centre = torch.eye(32) - 1 / 32
        q, k, v = ((parts[:, n].flatten(0, 1) @ block.input_layernorm.weight.diag() @ centre) for n in range(3))
        o = block.attention.dense.weight.T
    elif name == "T5":
        block, K, layer = model.decoder.block[1].layer[1], 4, layers[-1]
        q = folded(block.layer_norm, block.EncDecAttention.q.weight)
        k, v = (
            folded(model.encoder.final_layer_norm, p.weight) for p in (block.EncDecAttention.k, block.EncDecAttention.v)
        )
        o = block.EncDecAttention.o.weight.T
        assert layer.lengths == (10, 11) and layer.norms == (
            "decoder.block.1.layer.1.layer_norm",
            "encoder.final_layer_norm",
        )
    elif name == "OPT":
        block, K, layer = model.model.decoder.layers[1], 4, layers[1]
        part = block.self_attn
        q, k, v = (folded(block.self_attn_layer_norm, p.weight) for p in (part.q_proj, part.k_proj, part.v_proj))
        o = part.out_proj.weight.T
    else:
        block, K, layer = model.model.layers[1], 2, layers[1]
        part, M = block.self_attn, model.config.hidden_size
        D = layer.query.shape[1]
        fused = [part.q_proj, part.k_proj, part.v_proj] if name == "Llama GQA" else None
        rows = part.qkv_proj.weight.split([4 * D, 2 * D, 2 * D]) if fused is None else [p.weight for p in fused]
        q, k, v = (w @ block.input_layernorm.weight.diag() for w in rows)
        o = part.o_proj.weight.T
        assert q.shape[1] == M
    q, o = q.unflatten(0, (4, -1)), o.unflatten(0, (4, -1))
    k, v = (x.unflatten(0, (K, -1)).repeat_interleave(4 // K, 0) for x in (k, v))

    def alike(got: Tensor, expected: Tensor) -> None:
        factor = (got * expected).sum() / expected.square().sum()
        torch.testing.assert_close(got, factor * expected, atol=2e-5, rtol=1e-3)
        assert float(factor) > 0

    alike(layer.value, v)
    alike(layer.output, o)
    alike(layer.query.mT @ layer.key, q.mT @ k)


def test_latent_attention_has_matrices() -> None:
    """Of rank 13, the width of the latents, less the direction that the norm on them takes out."""
    layers = measured(BY_NAME["DeepSeek-V3"].build())
    assert [layer.value.shape for layer in layers] == [(4, 7, 28)] * 2 and layers[0].query.shape == (4, 10, 28)
    assert int(torch.linalg.matrix_rank(layers[0].value.flatten(0, 1), rtol=1e-4)) == 12


def straight(norm: nn.Module, x: Tensor, of: Tensor) -> Tensor:
    """A part x of what a norm reads, at the scale that it has for the whole."""
    if isinstance(norm, nn.Identity):
        return x
    if isinstance(norm, nn.LayerNorm):
        return (x - x.mean(-1, keepdim=True)) * (of.var(-1, correction=0) + norm.eps).rsqrt()[..., None] * norm.weight
    return x * (of.square().mean(-1) + torch.finfo(torch.float32).eps).rsqrt()[..., None] * norm.weight


@pytest.mark.parametrize(("norm", "behind"), [(nn.LayerNorm, False), (nn.RMSNorm, False), (nn.LayerNorm, True)])
def test_what_heads_write_adds_up_to_the_logits(norm: Any, behind: bool) -> None:
    model, ids = Small(norm, behind=behind), torch.tensor([TEXT])
    result = circuits(model, ids)
    with torch.no_grad(), probe(model) as seen:
        logits = model(ids)[0]
    with torch.no_grad():
        whole, rest = [], model.embed(ids)[0]  # of each layer what its heads write; all that is not of heads
        for part, after, call in zip(model.layers, model.behind, seen.calls, strict=True):
            heads = call.attend()[0] @ part.o_proj.weight.T.unflatten(0, (4, 5))
            update = heads.sum(0) + part.o_proj.bias
            whole.append(straight(after, heads, update))
            rest = rest + straight(after, part.o_proj.bias, update) + getattr(after, "bias", torch.zeros(()))
        written = torch.stack(whole)  # (layer, head, T, M)
        residual = rest + written.sum((0, 1))

        def above(all_of: Tensor) -> Tensor:
            return (all_of[:-1].gather(1, ids[0, 1:, None])[:, 0] - all_of[:-1].mean(-1)).mean()

        def logit(x: Tensor) -> Tensor:
            return above(straight(model.final, x, residual) @ model.unembed.weight.T)

        for head in result.heads:
            one, update = written[head.layer, head.head], written[head.layer].sum(0)
            assert head.norm == pytest.approx(float(one.norm(dim=-1).mean()), rel=1e-4)
            assert head.share == pytest.approx(float((one * update).sum() / update.square().sum()), abs=1e-5)
            assert head.residual == pytest.approx(float((one * residual).sum() / residual.square().sum()), abs=1e-5)
            assert head.logit == pytest.approx(float(logit(one)), abs=1e-4)
            value = seen.calls[head.layer].value[0, head.head // 2] @ weights_of(model, head.layer)[3][head.head]
            value = straight(model.behind[head.layer], value, torch.linspace(-1, 1, 24).expand(11, 24))
            for sign, share in ((1, head.copying), (-1, head.suppressing)):
                tops = model.unembed(model.final(sign * value)).topk(5).indices
                assert share == pytest.approx(float((tops == ids[0][:, None]).any(-1).float().mean()))
        bias = model.unembed(getattr(model.final, "bias", None) if norm is nn.LayerNorm else torch.zeros(24))
        total = sum(head.logit for head in result.heads) + logit(rest) + above(bias.expand(11, -1))
        torch.testing.assert_close(total, above(logits), atol=3e-4, rtol=0)
    for layer in range(3):
        assert sum(head.share for head in result.heads[4 * layer : 4 * layer + 4]) == pytest.approx(1.0, abs=1e-5)


SUMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "subtracted": (lambda x, y: x - y, -1.0),
    "a part subtracted": (lambda x, y: x.sub(y, alpha=0.5), -0.5),
    "a part added": (lambda x, y: x.add(y, alpha=0.3), 0.3),
    "scaled, then subtracted": (lambda x, y: x - 2.5 * y, -2.5),
    "subtracted from": (lambda x, y: -1.0 * (y - x), -1.0),
    "twice": (lambda x, y: y + x + y, 2.0),
    "divided": (lambda x, y: x + y / 2.5, 0.4),
}


@pytest.mark.parametrize("how", SUMS)
def test_the_factor_of_a_layer_is_that_of_its_sum(how: str) -> None:
    """The first layer reaches the end through the sum of the second, which adds or takes away its own part."""
    summed, factor = SUMS[how]

    class Own(Small):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for norm, layer in zip(self.norms, self.layers, strict=True):
                x = summed(x, layer(norm(x), mask=headwise.causal()))
            return self.unembed(self.final(x))

    [reading] = readings(Own(layers=2), [TEXT], loss=lambda out, ids: ids, mask_id=None, seed=0)
    ending = ending_of(Own(layers=2), reading)
    assert ending is not None and ending.factors == pytest.approx({0: factor, 1: factor})


def test_what_reaches_the_residual_by_addition_alone_is_told() -> None:
    granite = Row("Granite", "GraniteForCausalLM", "GraniteConfig", 2, sizes=_GQA | dict(residual_multiplier=0.22))
    for row, expected in (
        (granite, {0: 0.22, 1: 0.22}),
        (BY_NAME["Llama GQA"], {0: 1.0, 1: 1.0}),
        (BY_NAME["GPT-NeoX"], {0: 1.0, 1: 1.0}),
        (BY_NAME["OPT"], {0: 1.0, 1: 1.0}),
        (BY_NAME["GPT-2"], {0: 1.0, 1: 1.0}),
        (BY_NAME["DeepSeek-V3"], {0: 1.0, 1: 1.0}),
        (BY_NAME["Gemma2 softcap"], {0: 1.0, 1: 1.0}),  # through a norm behind the output projection
        (BY_NAME["BERT"], {}),  # a norm behind each sum
    ):
        model = row.build().requires_grad_(False)
        [reading] = readings(model, [TEXT[:8]], loss=lambda out, ids: ids, mask_id=None, seed=0)
        ending = ending_of(model, reading)
        assert ending is not None and ending.factors == pytest.approx(expected), row.name


@pytest.mark.parametrize("name", ["Llama GQA", "GPT-2", "Gemma2 softcap", "BERT", "T5", "DeepSeek-V3", "gpt-oss sinks"])
def test_circuits_of_models_of_transformers(name: str) -> None:
    model = BY_NAME[name].build()
    result = circuits(model, TEXT, most=7)
    direct = name not in ("BERT", "T5")
    assert all((head.logit is not None) == direct for head in result.heads)
    layers = 6 if name == "T5" else 2
    assert [(head.layer, head.head) for head in result.heads] == [*itertools.product(range(layers), range(4))]
    # T5: encoder 1 reads 1; the decoder's streams have 0, 1, 2 and 3 writers before, a memory has 2.
    assert result.pairs == dict.fromkeys("qkv", 16 * 7 if name == "T5" else 16)
    assert len(result.compositions) == 21 and all(0 <= one.value <= 1 for one in result.compositions)
    assert json.loads(result.to_json())["pairs"] == result.pairs and isinstance(result, Circuits)
    assert model.config._attn_implementation == "eager" and not model.training


def test_cross_attention_reads_two_streams() -> None:
    """Its queries what decoder heads wrote, its keys and values what encoder heads wrote."""
    compositions = circuits(BY_NAME["T5"].build(), TEXT, most=999).compositions
    read = {(one.kind, one.reader[0], one.writer[0]) for one in compositions}
    for kind, writers in (("q", {2, 3, 4}), ("k", {0, 1}), ("v", {0, 1})):
        assert {writer for k, reader, writer in read if (k, reader) == (kind, 5)} == writers
        assert {writer for k, reader, writer in read if (k, reader) == (kind, 4)} == {2, 3}


# --- heads with known jobs --------------------------------------------------------------------------------------------


def test_the_heads_that_feed_each_other_by_construction() -> None:
    model, jobs = constructed([["self", "previous-token", "broad"], ["duplicate-token", "induction", "copying"]])
    at = {job: place for place, job in jobs.items()}
    result = circuits(model, model.sample(41))
    strongest = {kind: next(one for one in result.compositions if one.kind == kind) for kind in "qkv"}
    assert (strongest["k"].reader, strongest["k"].writer) == (at["induction"], at["previous-token"])
    assert strongest["k"].value > 1.5 * strongest["k"].null
    width = measured(model)[0].output.shape[-1]
    assert {one.null for one in result.compositions} == {width**-0.5}
    by = {(head.layer, head.head): head for head in result.heads}
    for place, job in jobs.items():
        assert (by[place].copying >= 0.9) == (job in ("induction", "copying")), job
        assert by[place].suppressing == 0


def test_heads_are_named_by_the_roles_of_a_look() -> None:
    model, jobs = constructed([["self", "previous-token", "broad"], ["induction", "duplicate-token"]])
    ids = model.sample(17)[0].tolist()
    seen = headwise.look.at(model, ids)
    found = circuits(model, ids).with_roles(seen)
    assert {head: found.roles["{}.{}".format(*head)] for head in jobs} == jobs
    reader = "{}.{}".format(*found.compositions[0].reader)
    columns = [list(column.cells) for column in replace(found, roles={reader: "head to obj"}).table().columns]
    assert columns[1][columns[0].index(reader)] == "verb -> object"
    with pytest.raises(ValueError, match="give a look of the same model"):
        found.with_roles(replace(seen, heads=seen.heads[1:], maps=(), moved=()))


def test_arrows_of_the_graph_point_from_what_is_read_to_who_reads() -> None:
    pytest.importorskip("matplotlib")
    found = circuits(Small(), TEXT)
    axes = found.plot_circuits(most=3).axes[0]
    places = {text.get_text(): text.get_position() for text in axes.texts if text.get_text()}
    arrows = [(text.xy, text.xyann) for text in axes.texts if not text.get_text()]
    strongest = found.strongest(3)
    assert len(arrows) == len(strongest) >= 3
    for one, (points_at, begins) in zip(strongest, arrows, strict=True):
        reader, writer = ("{}.{}".format(*head) for head in (one.reader, one.writer))
        assert (points_at, begins) == (places[reader], places[writer]) and points_at[0] > begins[0]


def test_name_movers_read_what_is_left_out_by_their_queries() -> None:
    model, _ = constructed([["duplicate name"], ["subject inhibition"], ["name mover", "self"]])
    result = circuits(model, model.sample(41))
    tops = {kind: next(one for one in result.compositions if one.kind == kind) for kind in "qk"}
    assert (tops["q"].reader, tops["q"].writer) == ((2, 0), (1, 0))
    assert (tops["k"].reader, tops["k"].writer) == ((1, 0), (0, 0))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [[1, 7, 3, 20, 2], [20, 7, 3, 5, 2]], ids=["a token behind", "the first token"])
def test_outputs_that_are_no_logits_of_the_text_have_no_shares_of_them(text: list[int]) -> None:
    model = Small()
    model.unembed = nn.Linear(24, 12)  # such as a class of each token: none is for token 20
    result = circuits(model, text)
    assert all((head.logit, head.copying, head.suppressing, head.residual) == (None,) * 4 for head in result.heads)
    assert len(result.heads) == 12 and all(head.norm > 0 for head in result.heads)


def test_logits_in_a_tuple_are_logits() -> None:
    class Tupled(Small):
        def forward(self, ids: Tensor) -> Any:
            return (super().forward(ids), None)

    one, other = Small(), Tupled()
    other.load_state_dict(one.state_dict())
    alone, first = (circuits(model, TEXT).heads for model in (one, other))
    assert [head.logit for head in first] == [head.logit for head in alone]
    assert None not in {head.logit for head in first}


@pytest.mark.unchecked
def test_what_does_not_fit_is_refused() -> None:
    model = Small()
    for text, ids in (
        (r"one text of at least 3 tokens; got 2; give a longer text", [1, 2]),
        (r"one text of at least 3 tokens; got 2 texts, of 11, 11 tokens; give one", [TEXT, TEXT]),
        ("ids of this model are 0 to 52; got 99", [1, 2, 99]),
    ):
        with pytest.raises(ValueError, match=text):
            circuits(model, ids)
    model.layers[1].o_proj = nn.Sequential(nn.Tanh(), model.layers[1].o_proj)
    with pytest.raises(ValueError, match=r"no module reads the heads of 'layers\.1' side by side .*no W_O a head"):
        circuits(model, TEXT)


def test_the_table_of_heads_lists_those_that_write_the_most() -> None:
    found = circuits(Small(), torch.tensor(TEXT))
    largest = sorted(found.heads, key=lambda head: head.norm, reverse=True)[:3]
    columns = [list(column.cells) for column in found.heads_table(most=3).columns]
    assert list(zip(*columns[:2], strict=True)) == [(str(head.layer), str(head.head)) for head in largest]
    assert found.heads_table().row_count == len(found.heads) > 3

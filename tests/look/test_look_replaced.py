"""Models made of torch.nn.MultiheadAttention, after `headwise.nn.replace`: looks, ablations, importance, circuits."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise import look
from headwise.nn import from_torch, replace

T, H, D, WORDS = 13, 3, 13, 37
M = H * D
SHORT = look.Repeats(length=T)


class Own(nn.Module):
    """Ours in the place of torch's module; what is told of ours is the measure here, and tested elsewhere."""

    _qkv_same_embed_dim = False
    in_proj_bias = None

    def __init__(self, theirs: nn.MultiheadAttention) -> None:
        super().__init__()
        self.batch_first = theirs.batch_first
        theirs.batch_first = True
        self.attend = from_torch(theirs)

    def forward(self, x: Tensor, *_: Tensor, attn_mask: Tensor | None, **rest: Any) -> tuple[Tensor, None]:
        x = x if self.batch_first else x.transpose(0, 1)
        out = self.attend(x, mask=None if attn_mask is None else headwise.causal())
        return out if self.batch_first else out.transpose(0, 1), None


def with_own(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for part in list(model.modules()):
        for name, child in part.named_children():
            if isinstance(child, nn.MultiheadAttention):
                setattr(part, name, Own(child))
    return model


class Reader(nn.Module):
    def __init__(self, *, causal: bool, batch_first: bool) -> None:
        super().__init__()
        self.causal, self.batch_first = causal, batch_first
        self.embed, self.place = nn.Embedding(WORDS, M), nn.Embedding(T, M)
        layer = nn.TransformerEncoderLayer(M, H, 19, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(M, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        x = self.embed(ids) + self.place(torch.arange(n))
        mask = nn.Transformer.generate_square_subsequent_mask(n) if self.causal else None
        x = self.encoder(x if self.batch_first else x.transpose(0, 1), mask)
        return self.head(x if self.batch_first else x.transpose(0, 1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(M), nn.LayerNorm(M)
        self.self_attention = nn.MultiheadAttention(M, H, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(M, 19), nn.GELU(), nn.Linear(19, M))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        x = x + self.self_attention(y, y, y, need_weights=False, attn_mask=None)[0]
        return x + self.mlp(self.after(x))


class Viewer(nn.Module):
    """A vision transformer: a token for the class, then 3 x 5 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_size = 4
        self.patches = nn.Conv2d(3, M, 4, stride=4)
        self.first, self.place = nn.Parameter(torch.randn(1, 1, M)), nn.Parameter(torch.randn(1, 16, M))
        self.blocks = nn.Sequential(Block(), Block())
        self.classes = nn.Linear(M, 7)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.place
        return self.classes(self.blocks(x)[:, 0])


def assert_same_heads(one: look.Look, other: look.Look) -> None:
    for mine, theirs in zip(one.heads, other.heads, strict=True):
        assert (mine.role, mine.part, mine.layer, mine.head) == (theirs.role, theirs.part, theirs.layer, theirs.head)
        assert mine.entropy == pytest.approx(theirs.entropy, rel=1e-4)
        torch.testing.assert_close(torch.tensor(mine.map), torch.tensor(theirs.map), rtol=1e-3, atol=1e-5)


def assert_same_importance(one: look.Importance, other: look.Importance) -> None:
    for by in ("gradient", "zero", "mean"):
        mine, theirs = (torch.tensor([getattr(head, by) for head in result.heads]) for result in (one, other))
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-5)
        assert bool((mine != 0).all())


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_an_encoder_of_torch_is_seen_as_one_of_our_modules(causal: bool, batch_first: bool) -> None:
    model = Reader(causal=causal, batch_first=batch_first)
    own, ids, mask_id = with_own(model), list(range(2, T + 2)), None if causal else 1
    with pytest.raises(TypeError, match=r"'encoder\.layers\.0\.self_attn', .* after headwise\.nn\.replace\(model\)"):
        look.at(model, ids)
    replaced = replace(model)
    seen, expected = (look.at(one, ids, repeats=SHORT) for one in (replaced, own))
    assert seen.kind == ("decoder" if causal else "encoder") and (seen.num_layers, seen.num_heads) == (2, H)
    assert [head.module for head in seen.heads[::H]] == [f"encoder.layers.{n}.self_attn" for n in (0, 1)]
    assert_same_heads(seen, expected)
    by = ["gradient", "zero", "mean"]
    assert_same_importance(*(look.importance(one, ids, by=by, mask_id=mask_id) for one in (replaced, own)))
    one, other = (look.ablate(one, ids, [(1, 2)], mask_id=mask_id) for one in (replaced, own))
    assert one.before != one.after and one.after == pytest.approx(other.after, rel=1e-5)
    turned = Reader(causal=causal, batch_first=True)  # so that the norm before it is found in our module, too
    turned.load_state_dict(model.state_dict())
    first, second = (look.circuits(one, ids) for one in (replaced, with_own(turned)))
    for mine, theirs in zip(first.compositions, second.compositions, strict=True):
        assert mine.value == pytest.approx(theirs.value, rel=1e-3) and mine.value > 0


def test_a_vision_transformer_is_seen_over_its_patches() -> None:
    """Its input has another name than pixel_values, and its patch size stands on the model, which has no config."""
    model, read = Viewer(), {"pixel_values": torch.randn(1, 3, 12, 20)}
    own = with_own(model)
    seen, expected = look.at(replace(model), read), look.at(own, read)
    assert seen.kind == "encoder" and [axis.kind for axis in seen.axes] == ["picture"]
    assert len(seen.axes[0].cells) == 16 and seen.axes[0].grids == expected.axes[0].grids and len(seen.pictures) == 1
    assert_same_heads(seen, expected)
    by = ["gradient", "zero", "mean"]
    assert_same_importance(look.importance(model, read, by=by), look.importance(own, read, by=by))
    plain = Viewer()
    del plain.patch_size
    assert not look.at(replace(plain), read).axes[0].cells
    with pytest.raises(ValueError, match="it takes images; got 'labels_of'; leave that out"):
        look.at(model, {**read, "labels_of": torch.ones(1)})


def test_planted_heads_are_recognised() -> None:
    """One-hot positions: head 0 asks for the position before, head 1 for its own, head 2 for nothing."""

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place, self.embed = nn.Embedding.from_pretrained(torch.eye(T, M)), nn.Embedding(WORDS, M)
            self.attend = nn.MultiheadAttention(M, H, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.place(torch.arange(ids.shape[1])).expand(len(ids), -1, -1)
            return self.attend(x, x, x)[0]

    model = Placed()
    with torch.no_grad():
        model.attend.in_proj_weight[: 2 * M] = 0
        model.attend.in_proj_weight[: 2 * D, :D] = 40 * torch.eye(D).repeat(2, 1)
        model.attend.in_proj_weight[M : M + 2 * D, :D] = torch.cat([torch.eye(D).roll(1, 0), torch.eye(D)])
    heads = look.at(replace(model), list(range(T)), repeats=None).heads
    assert [(head.role, head.states) for head in heads] == [("previous-token", ()), ("self", ()), ("-", ("broad",))]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_cross_attention_of_torchs_decoder_layers_is_known() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, M)
            self.both = nn.Transformer(M, H, 1, 1, 19, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            return self.both(x, x, tgt_mask=nn.Transformer.generate_square_subsequent_mask(ids.shape[1]))

    heads = look.at(replace(Pair()), list(range(T)), repeats=None).heads
    assert [head.part for head in heads[::H]] == ["encoder", "decoder", "cross"]


def test_a_model_of_fewer_positions_than_the_random_tokens_is_told_how() -> None:
    model = replace(Reader(causal=True, batch_first=True))
    with pytest.raises(ValueError, match=r"failed on the 72 random tokens, .* repeats=headwise\.look\.Repeats\(length"):
        look.at(model, list(range(T)))

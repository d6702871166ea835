"""What transformers passes where two numbers that are often equal differ: packed queries and keys of unequal length,
windows at the edges of pages, tokens of another dtype than those before, tensors of several axes.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from headwise.cache import RollingCache
from headwise.hf.attention.function import headwise_attention
from headwise.hf.attention.mask import StructuralMask
from headwise.hf.decode.cache import FullLayer, SlidingLayer
from headwise.hf.files.folder import find_weights
from headwise.ops.masks import causal
from headwise.ops.storage.paged import PAGE

H, K, D, V = 4, 2, 6, 5


class CrossAttention(nn.Module):
    is_causal = False


def test_packed_sequences_whose_queries_and_keys_have_their_own_ends() -> None:
    """Cross-attention of a packed batch: each sequence alone gives the same."""
    for of_queries, of_keys in itertools.product(itertools.combinations(range(1, 5), 2), repeat=2):
        T, S = (0, *of_queries, 6), (0, *of_keys, 7)
        query, key, value = torch.randn(1, H, 6, D), torch.randn(1, K, 7, D), torch.randn(1, K, 7, V)
        ends = {"cu_seq_lens_q": torch.tensor(T), "cu_seq_lens_k": torch.tensor(S)}
        packed, _ = headwise_attention(CrossAttention(), query, key, value, None, **ends)
        alone = []
        for (i, j), (k, n) in zip(itertools.pairwise(T), itertools.pairwise(S), strict=True):
            part = query[:, :, i:j], key[:, :, k:n], value[:, :, k:n]
            alone.append(headwise_attention(CrossAttention(), *part, None)[0])
        torch.testing.assert_close(packed, torch.cat(alone, 1))


@pytest.mark.parametrize("window", [1, 2, 3, 129, 130, 131])
def test_a_layer_with_a_window_reserves_the_pages_of_that_window(window: int) -> None:
    layer = SlidingLayer(window, 1000, None)
    layer.update(torch.randn(1, K, 4, D), torch.randn(1, K, 4, V))
    assert layer.nbytes == RollingCache(1, K, D, V, window=window).nbytes
    assert layer.get_max_length() == window


@pytest.mark.parametrize("window", [1, 5, 131])
def test_pieces_of_any_length_see_the_window_of_their_first_token(window: int) -> None:
    """Also for a mask without a window, as some models pass it; one of a page is taken at once, a longer one cut."""
    pieces = (7, 1, PAGE, 3, PAGE + 1, 1, 2, PAGE - 1, PAGE, 1, 2 * PAGE + 3, 5)
    total, layer, at = sum(pieces), SlidingLayer(window, 5000, None), 0
    query, key, value = torch.randn(2, H, total, D), torch.randn(2, K, total, D), torch.randn(2, K, total, V)
    for T in pieces:
        S, first = layer.get_mask_sizes(T) if at else (T, 0)
        new = slice(at, at + T)
        keys, values = layer.update(key[:, :, new], value[:, :, new])
        mask = StructuralMask(causal(), (2, 1, T, S))
        out, _ = headwise_attention(CrossAttention(), query[:, :, new], keys, values, mask)
        assert (keys.shape[2], first + S) == (S, at + T), (at, T)
        seen = slice(max(at - window + 1, 0), at + T)
        x = query[:, :, new].double() @ key[:, :, seen].double().repeat_interleave(H // K, 1).mT * D**-0.5
        x = x.masked_fill(torch.ones(x.shape[2:]).triu(x.shape[3] - T + 1).bool(), -torch.inf).softmax(-1)
        expected = (x @ value[:, :, seen].double().repeat_interleave(H // K, 1)).transpose(1, 2)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=4e-6)
        at += T


@pytest.mark.parametrize("kind", ["static", "paged"])
def test_int8_keys_have_the_dtype_of_the_last_tokens(kind: str) -> None:
    layer = FullLayer(kind, 20, torch.int8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layer.update(torch.randn(1, K, 2, D, dtype=dtype), torch.randn(1, K, 2, V, dtype=dtype))
        assert layer.keys is not None and layer.values is not None
        assert layer.keys.dtype == layer.values.dtype == dtype


def test_elements_of_a_folder_are_those_of_all_axes(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(3, 5), "b": torch.zeros(2, 3, 4), "c": torch.zeros(7), "d": torch.zeros(())}
    save_file(tensors, tmp_path / "model.safetensors")
    assert find_weights(tmp_path).numel == 15 + 24 + 7 + 1

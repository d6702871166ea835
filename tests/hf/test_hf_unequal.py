"""What transformers passes where two numbers that are often equal differ: packed queries and keys of unequal length,
windows at the edges of pages.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from headwise.cache import RollingCache
from headwise.hf.attention.function import headwise_attention
from headwise.hf.decode.cache import SlidingLayer

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

"""Compiled calls of more query rows than one strip has. Not collected by name: test_compiled_strips.py runs this in a
process of its own, without the shape checker, whose wrappers the compiler cannot trace."""

import pytest
import torch

import headwise

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler's own, of several kinds
B, H, K, T, S, D = 1, 2, 1, 523, 601, 4  # a strip of a graph has 512 rows

MASKS = {
    "window": headwise.window(37, 5),
    "keep": headwise.keep((torch.arange(T)[:, None] * 7 + torch.arange(S)) % 5 != 0),
    "bias": headwise.bias((torch.arange(T)[:, None] - torch.arange(S)).abs().float() * -0.01) & headwise.causal(),
    "steps": headwise.dilated(7) & headwise.causal(),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_compiled_call_has_the_masks_of_all_its_rows(name: str) -> None:
    torch.compiler.reset()
    draw = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(B, heads, n, D, generator=draw) for heads, n in ((H, T), (K, S), (K, S)))

    def call(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        options = {"mask": MASKS[name], "return_lse": True}
        return headwise.attention(query, key, value, backend="blocks", **options)

    made = torch.compile(call, backend="eager", fullgraph=True)(query)
    expected = headwise.attention(query, key, value, mask=MASKS[name], backend="reference", return_lse=True)
    for ours, theirs in zip(made, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

"""The benchmarks of hybrid models, of parts of a module and of dropped tokens: at small sizes their ways agree."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hybrid_models import HYBRIDS

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import dropping, hybrid, parts  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["LFM2", "Qwen3.5"])
def test_hybrid_models_give_the_same_logits_with_each_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = next(row for row in HYBRIDS if row.name == name)
    built = row.build()
    sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
    config = type(built.config)(**{**built.config.to_dict(), **sizes, "head_dim": 16})
    monkeypatch.setitem(hybrid.FAMILIES, name, (type(built), config))
    monkeypatch.setattr(hybrid, "STEPS", 2)
    model = hybrid.built(name, torch.float32)
    ways = {way: hybrid.Way(model, 97, **how) for way, how in hybrid.WAYS.items()}
    truth = ways["transformers"].logits()
    for way, one in ways.items():
        off = float((one.logits() - truth).norm() / truth.norm()) if way != "transformers" else 0.0
        assert off < {"8 bits": 0.05, "4 bits": 0.5}.get(way, 1e-4), way
        assert 0 < one.nbytes()["states"] == ways["transformers"].nbytes()["states"]
    report = hybrid.measured(name, 97, torch.float32, turns=1)
    assert report["bytes"]["4 bits"]["keys and values"] < report["bytes"]["8 bits"]["keys and values"]
    hybrid.print_table({"results": [report]})


def test_layers_with_parts_agree_with_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = parts.modules({"d_model": 48, "num_heads": 6, "num_kv_heads": 2}, torch.float32)
    for ways in (parts.training(made, 13, torch.float32), parts.decoding(made, 17, torch.float32)):
        with torch.set_grad_enabled("PyTorch, largest logits" in ways):
            outs = {name: run().detach() for name, run in ways.items()}
        for name, out in outs.items():
            if not name.startswith("PyTorch"):
                torch.testing.assert_close(out, outs[f"PyTorch, {name}"], rtol=1e-4, atol=1e-5, msg=name)
        assert not torch.equal(outs["plain"], outs["gate per number"])
    x = torch.randn(1, 13, 48)
    made["largest logits"](x, mask=parts.headwise.causal())
    torch.testing.assert_close(made["largest logits"].inner.max_logits, parts.by_matrix(made["plain"], x)[1])
    monkeypatch.setattr(parts, "SIZES", {"d_model": 48, "num_heads": 6, "num_kv_heads": 2})
    monkeypatch.setattr(parts, "T", 13)
    monkeypatch.setattr(parts, "S", 17)
    parts.print_table({"results": parts.measured(1, torch.float32)})


def test_what_is_left_of_a_cache_is_what_was_gathered() -> None:
    case = dropping.Case(4, 2, 16, 97, 31)
    attending, dropping_ways = dropping.lineup(case, torch.float32)
    truth = attending["SDPA on gathered keys"]()
    for name in ("tokens left", "never had more"):
        torch.testing.assert_close(attending[name](), truth, rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(attending["all tokens"](), attending["SDPA, all tokens"](), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(attending["tokens left, and a window"](), truth)
    assert dropping_ways["keep"]().columns == [31] and dropping_ways["the cache without it"]().columns == [97]
    dropping.print_table({"results": [dropping.measured(case, torch.float32, 1)]})

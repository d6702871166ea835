"""Tokens a second of whole decode steps, beside llama.cpp: `python benchmarks/llama_cpp.py [--size 155M] [--json]`.

The model is a Llama of 155 M (8 layers, d_model 1024, 16 heads on 4) or 1.1 B parameters (16 layers, d_model 2048, 32
heads on 8) with random weights. Ways take turns, after a pause in which the threads of the one before come to rest:
transformers with PyTorch's attention; with headwise's and its cache; the same with `fast_decode`; and llama.cpp through
node-llama-cpp with the same weights in a GGUF file, if `make bench-peers` has installed it. With `--small-caches` it is
`fast_decode` and llama.cpp alone, with caches of 16, 8, 4 and 3 bits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import headwise.hf

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: this folder is on the path, its parent is not

from benchmarks import clock, table
from benchmarks.steps import Steps, in_turns, random_model, timed

HERE = Path(__file__).resolve().parent
NODE = HERE.parent / "build" / "peers" / "node" / "node_modules" / "node-llama-cpp" / "dist" / "index.js"
STEPS = 8  # of a turn
SIZES = {
    "155M": {},
    "1B": {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8},
}


def config(layers: int = 8, hidden: int = 1024, heads: int = 16, kv_heads: int = 4, vocab: int = 32768) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=1 << 16,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        tie_word_embeddings=True,
    )


def transformers_way(model: Any, cached: int, attention: str, fast: bool, bits: int | None = None) -> Steps:
    """Steps of the model after `cached` random tokens in a cache of transformers or of headwise."""
    of = model.config
    shape = (1, of.num_key_value_heads, cached, of.hidden_size // of.num_attention_heads)
    own = attention == "headwise"
    of._attn_implementation = attention  # what set_attn_implementation does, without its checks
    cache = headwise.hf.make_cache(model, max_length=cached + 512, bits=bits) if own else DynamicCache(config=of)
    source = torch.Generator().manual_seed(2)
    for layer in range(of.num_hidden_layers):
        key, value = (torch.randn(shape, generator=source).to(model.dtype) for _ in range(2))
        cache.update(key, value, layer)
    ids = torch.tensor([[300 % of.vocab_size]])

    def steps() -> list[float]:
        of._attn_implementation = attention
        return timed(model, ids, cache, STEPS, fast=fast)

    return steps


@contextmanager
def llama_cpp_way(model: Any, cached: int, kind: str = "F16") -> Iterator[Steps]:
    """Steps of llama.cpp with the same weights and a cache of a type of GGML, in a process that waits for its turn.

    Raises:
        LookupError: node-llama-cpp or gguf is not installed.
    """
    path = Path(os.environ.get("NODE_LLAMA_CPP", NODE))
    if not path.exists():
        raise LookupError("node-llama-cpp is not installed: make bench-peers")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        write_gguf(model, file)
        command = ["node", str(HERE / "llama_cpp.mjs"), str(file), str(cached), str(torch.get_num_threads()), kind]
        env = {**os.environ, "NODE_LLAMA_CPP": str(path)}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, text=True
        ) as child:
            assert child.stdin is not None and child.stdout is not None
            child.stdout.readline()  # the prompt is in its cache

            def steps() -> list[float]:
                assert child.stdin is not None and child.stdout is not None
                print(STEPS, file=child.stdin, flush=True)
                times: list[float] = json.loads(child.stdout.readline())
                return times

            try:
                yield steps
            finally:
                child.kill()


def write_gguf(model: Any, file: Path) -> None:
    """Write the weights of a Llama in its dtype, with a vocabulary of numbers.

    Raises:
        LookupError: the package gguf is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise LookupError("gguf is not installed: make bench-peers") from None
    of, heads = model.config, {"q": model.config.num_attention_heads, "k": model.config.num_key_value_heads}
    kinds = {torch.bfloat16: (gguf.GGMLQuantizationType.BF16, 32), torch.float16: (None, 1), torch.float32: (None, 0)}
    kind, number = kinds[model.dtype]
    out = gguf.GGUFWriter(str(file), "llama")
    out.add_context_length(of.max_position_embeddings)
    out.add_embedding_length(of.hidden_size)
    out.add_block_count(of.num_hidden_layers)
    out.add_feed_forward_length(of.intermediate_size)
    out.add_head_count(heads["q"])
    out.add_head_count_kv(heads["k"])
    out.add_layer_norm_rms_eps(of.rms_norm_eps)
    out.add_rope_freq_base(500000.0)
    out.add_rope_dimension_count(of.hidden_size // heads["q"])
    out.add_vocab_size(of.vocab_size)
    out.add_file_type(number)
    words = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % byte for byte in range(256))]
    words += [b"t%d" % number for number in range(of.vocab_size - len(words))]
    out.add_tokenizer_model("llama")
    out.add_token_list(words)
    out.add_token_scores([0.0] * len(words))
    out.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(words) - 259))
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.layers.": "blk.",
    }  # fmt: skip
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # the embedding
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        part = name.removesuffix(".weight")[-1]
        if "attn_q." in name or "attn_k." in name:  # neighbours rotate together there, the halves of a head here
            split = weight.view(heads[part], 2, -1, weight.shape[1])
            weight = split.transpose(1, 2).reshape(weight.shape)
        if weight.ndim == 1:
            out.add_tensor(name, weight.float().numpy())
        elif kind is None:
            out.add_tensor(name, weight.numpy())
        else:
            out.add_tensor(name, weight.contiguous().view(torch.int16).numpy().view(np.uint8), raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def measured(of: LlamaConfig, cached: list[int], dtype: torch.dtype, turns: int, small: bool = False) -> dict[str, Any]:
    """The machine, and for each number of cached tokens the median milliseconds of a step by way."""
    model = random_model(LlamaForCausalLM, of, dtype)
    moved = random_model(LlamaForCausalLM, of, dtype)  # the same weights; fast_decode moves them to huge pages
    rows = []
    for count in cached:
        ways = {"fast_decode": transformers_way(moved, count, "headwise", True)}
        theirs = {"llama.cpp": "F16"}
        if small:
            ways |= {f"{bits} bits": transformers_way(moved, count, "headwise", True, bits) for bits in (8, 4, 3)}
            theirs |= {"llama.cpp q8_0": "Q8_0", "llama.cpp q4_0": "Q4_0"}
        else:
            ways = {name: transformers_way(model, count, name, False) for name in ("sdpa", "headwise")} | ways
        absent = {}
        with ExitStack() as processes:
            for name, kind in theirs.items():
                try:
                    ways[name] = processes.enter_context(llama_cpp_way(model, count, kind))
                except LookupError as reason:
                    absent[name] = str(reason)
            times = in_turns(ways, turns)
        rows.append({"case": f"decode at {count}", "ms": times, "absent": absent})
    of_model = {"parameters": sum(p.numel() for p in model.parameters()), "dtype": str(dtype).removeprefix("torch.")}
    return {"machine": clock.machine(), "model": of_model, "results": rows}


def print_table(report: dict[str, Any]) -> None:
    of, machine = report["model"], report["machine"]
    grid = Table(
        title=f"Llama of {of['parameters'] / 1e6:.0f} M, {of['dtype']}, {machine['threads']} threads; tokens a second"
    )
    names = [*report["results"][0]["ms"], *report["results"][0]["absent"]]
    for name in ("case", *names):
        grid.add_column(name, justify="left" if name == "case" else "right")
    for row in report["results"]:
        ways = (row["ms"].get(name) for name in names)
        grid.add_row(row["case"], *("absent" if ms is None else f"{1e3 / ms:.1f}" for ms in ways))
    table.console().print(grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="155M")
    parser.add_argument("--cached", type=int, nargs="+", default=[512, 8192])
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--small-caches", action="store_true")
    table.add_delivery(parser)
    options = parser.parse_args()
    of, dtype = config(**SIZES[options.size]), getattr(torch, options.dtype)
    report = measured(of, options.cached, dtype, options.turns, options.small_caches)
    table.deliver(report, print_table, options, "llama-cpp")


if __name__ == "__main__":
    main()

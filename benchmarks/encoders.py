"""Sentences a second of an encoder of MiniLM-L6's sizes, beside the engines that people use for embeddings.

    python benchmarks/encoders.py [--rounds 5] [--json]

64 sentences, of 128 tokens each or of 8 to 128 with padding; random weights; every way computes the last hidden states.
ONNX Runtime and OpenVINO run what `torch.onnx.export` writes, CTranslate2 the converted checkpoint, each where it is
installed. "linear" is PyTorch's linear layers of the same sizes alone: what no attention can save.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from transformers import BertConfig, BertModel, BertTokenizerFast

import headwise.hf  # noqa: F401  registers attn_implementation="headwise"

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: this folder is on the path, its parent is not

from benchmarks import clock, table

SENTENCES, LENGTH, VOCAB = 64, 128, 30522
Way = Callable[[], Tensor]


def config(layers: int = 6, hidden: int = 384, heads: int = 12) -> BertConfig:
    return BertConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
        position_embedding_type="absolute",  # CTranslate2 looks for it
    )


def sentences(count: int, length: int, padded: bool) -> tuple[Tensor, Tensor]:
    """Token ids (B, T) and the mask of their real tokens."""
    ids = torch.randint(5, VOCAB, (count, length), generator=torch.Generator().manual_seed(1))
    lengths = torch.linspace(8 if padded else length, length, count).long()
    mask = (torch.arange(length) < lengths[:, None]).long()
    return ids * mask, mask


def of_torch(model: BertModel, attention: str, ids: Tensor, mask: Tensor) -> Way:
    def run() -> Tensor:
        model.config._attn_implementation = attention  # what set_attn_implementation does, without its checks
        out: Tensor = model(ids, attention_mask=mask).last_hidden_state
        return out

    return run


def linear_alone(model: BertModel, tokens: int) -> Way:
    """All linear layers of the encoder on as many tokens."""
    layers = [m for m in model.encoder.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {m.in_features: torch.randn(tokens, m.in_features, dtype=m.weight.dtype) for m in layers}

    def run() -> Tensor:
        for layer in layers:
            out: Tensor = layer(inputs[layer.in_features])
        return out

    return run


def exported(model: BertModel, ids: Tensor, mask: Tensor, folder: Path) -> Path:
    """The model as ONNX at these sizes."""
    path = folder / "model.onnx"
    if not path.exists():
        model.config._attn_implementation = "sdpa"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(model, (ids, mask), path, dynamo=True, input_names=["ids", "mask"], verbose=False)
    return path


def of_onnxruntime(model: BertModel, ids: Tensor, mask: Tensor, folder: Path) -> Way:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    path = str(exported(model, ids, mask, folder))
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feeds = {place.name: x.numpy() for place, x in zip(session.get_inputs(), (ids, mask), strict=True)}
    return lambda: torch.from_numpy(session.run(None, feeds)[0])


def of_openvino(model: BertModel, ids: Tensor, mask: Tensor, folder: Path, precision: str) -> Way:
    import openvino

    hints = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
    }
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(exported(model, ids, mask, folder)), "CPU", hints)
    request = compiled.create_infer_request()
    return lambda: torch.from_numpy(next(iter(request.infer([ids.numpy(), mask.numpy()]).values())))


def of_ctranslate2(model: BertModel, ids: Tensor, mask: Tensor, folder: Path, kind: str) -> Way:
    import ctranslate2

    if not (folder / "ct2").exists():
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"t{i}" for i in range(5, VOCAB))]
        (folder / "hf").mkdir(exist_ok=True)
        (folder / "hf" / "vocab.txt").write_text("\n".join(words))
        BertTokenizerFast(str(folder / "hf" / "vocab.txt")).save_pretrained(folder / "hf")
        model.save_pretrained(folder / "hf")
        ctranslate2.converters.TransformersConverter(str(folder / "hf")).convert(str(folder / "ct2"))
    threads = torch.get_num_threads()
    encoder = ctranslate2.Encoder(str(folder / "ct2"), "cpu", compute_type=kind, intra_threads=threads)
    texts = [row[:n].tolist() for row, n in zip(ids, mask.sum(1), strict=True)]

    def run() -> Tensor:
        import numpy as np

        return torch.from_numpy(np.array(encoder.forward_batch(texts).last_hidden_state))

    return run


def lineup(
    of: BertConfig, count: int, length: int, padded: bool, folder: Path
) -> tuple[dict[str, Way], dict[str, str]]:
    """The ways, and why each other one is absent."""
    torch.manual_seed(0)
    model = BertModel(of, add_pooling_layer=False).eval()
    torch.manual_seed(0)
    half = BertModel(of, add_pooling_layer=False).eval().bfloat16()
    ids, mask = sentences(count, length, padded)
    ways: dict[str, Way] = {}
    for name, one in (("fp32", model), ("bf16", half)):
        for attention in ("headwise", "sdpa"):
            ways[f"{attention} {name}"] = of_torch(one, attention, ids, mask)
        ways[f"linear {name}"] = linear_alone(one, ids.numel())
    others: dict[str, Callable[[], Way]] = {
        "onnxruntime fp32": lambda: of_onnxruntime(model, ids, mask, folder),
        "openvino fp32": lambda: of_openvino(model, ids, mask, folder, "f32"),
        "openvino bf16": lambda: of_openvino(model, ids, mask, folder, "bf16"),
        "ctranslate2 fp32": lambda: of_ctranslate2(model, ids, mask, folder, "float32"),
        "ctranslate2 bf16": lambda: of_ctranslate2(model, ids, mask, folder, "bfloat16"),
    }
    absent = {}
    real = mask.bool()
    truth = ways["sdpa fp32"]()[real]
    for name, build in others.items():
        try:
            way = build()
            off = float((way().float()[real] - truth).norm() / truth.norm())
        except ImportError as error:
            absent[name] = f"{error.name} is not installed"
        except Exception as error:  # each library raises errors of its own
            absent[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
        else:
            if off < 0.05:
                ways[name] = way
            else:
                absent[name] = f"another result, off by {off:.1g}"
    return ways, absent


def measured(of: BertConfig, count: int, length: int, rounds: int, seconds: float) -> dict[str, Any]:
    """The machine, and the milliseconds of each way without and with padding."""
    rows = []
    with torch.inference_mode():
        for padded in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                ways, absent = lineup(of, count, length, padded, Path(folder))
                times = clock.measure(ways, {}, rounds, seconds)
            case = f"{count} x {8 if padded else length}{f' to {length}, padded' if padded else ''}"
            ms = {name: 1e3 * times.median(name) for name in ways}
            rows.append({"case": case, "ms": ms, "absent": absent, "disturbed": times.disturbed})
    return {"machine": clock.machine(), "sentences": count, "results": rows}


def print_table(report: dict[str, Any]) -> None:
    grid = Table(title=f"MiniLM-L6's sizes, {report['machine']['threads']} threads: sentences a second (of headwise)")
    grid.add_column("way")
    for row in report["results"]:
        grid.add_column(row["case"] + ("~" if row["disturbed"] else ""), justify="right")
    for name in report["results"][0]["ms"]:
        cells = []
        for row in report["results"]:
            ms, ours = row["ms"].get(name), row["ms"][f"headwise {name.split()[1]}"]
            cells.append("absent" if ms is None else f"{1e3 * report['sentences'] / ms:.0f} ({ours / ms:.2f})")
        grid.add_row(name, *cells)
    table.console().print(grid)
    for row in report["results"]:
        for name, why in row["absent"].items():
            table.console().print(f"{row['case']}: {name} is absent: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for each of the two rows")
    table.add_delivery(parser)
    options = parser.parse_args()
    report = measured(config(), SENTENCES, LENGTH, options.rounds, options.budget)
    table.deliver(report, print_table, options, "encoders")


if __name__ == "__main__":
    main()

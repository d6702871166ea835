"""Every family: pruned, zeroed and unchanged checkpoints load in stock transformers and compute what they should.

What they should compute is the original with a gate on its heads, seen and changed through `headwise.nn.probe`, which
knows no family and no name of a tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
import transformers
from hf_folders import quiet
from hf_models import inputs, logits
from reshape_models import FAMILIES, put, saved
from torch import Tensor

from headwise import hf
from headwise.hf.loading import verify_process as proving
from headwise.hf.models.architectures import CACHE
from headwise.nn import AttentionCall, probe
from headwise.reshape import plan_prune, random_scores

MHA = {0: [1], 1: [3]}  # of four heads in each of two layers
WITHIN = {0: [1, 2], 1: [0, 3]}  # of two groups of two, one of each
GROUP = {0: [0, 1], 1: [2, 3]}
T5 = {"encoder.0": [1], "encoder.1": [1], 0: [2], 1: [2], "cross.0": [0], "cross.1": [3]}
HALF = {0: [0, 1], 1: [1, 2]}
UNEVEN = {0: [0, 2, 3], 1: [1]}  # of encoders, whose layers may lose different numbers
Heads = Mapping[int | str, Iterable[int]]
ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert")

PRUNED: dict[str, list[tuple[Heads, str]]] = {
    "llama": [(MHA, "llama"), (HALF, "llama")],
    "llama GQA": [(WITHIN, "llama"), (GROUP, "llama")],
    "llama odd": [(MHA, "mistral"), (HALF, "llama")],
    "llama biased": [(MHA, "granite"), (HALF, "llama")],
    "mistral": [(WITHIN, "mistral"), (GROUP, "mistral")],
    "mixtral": [(WITHIN, "mixtral"), (GROUP, "mixtral")],
    "qwen2": [(WITHIN, "qwen2"), (GROUP, "qwen2")],
    "qwen3": [(WITHIN, "qwen3"), (GROUP, "qwen3")],
    "gemma": [(WITHIN, "gemma"), (GROUP, "gemma")],
    "gemma2": [(WITHIN, "gemma2"), (GROUP, "gemma2")],
    "gemma3_text": [(WITHIN, "gemma3_text"), (GROUP, "gemma3_text")],
    "gemma3": [(WITHIN, "gemma3"), (GROUP, "gemma3")],
    "phi3": [(WITHIN, "phi3"), (GROUP, "phi3")],
    "granite": [(WITHIN, "granite"), (GROUP, "granite")],
    "cohere": [(WITHIN, "cohere"), (GROUP, "cohere")],
    "smollm3": [(WITHIN, "smollm3"), (GROUP, "smollm3")],
    "gpt_oss": [(WITHIN, "gpt_oss"), (GROUP, "gpt_oss")],
    "deepseek_v3": [(MHA, "deepseek_v3"), (HALF, "deepseek_v3")],
    "t5": [(T5, "t5")],
    "vit": [(MHA, "vit"), (HALF, "vit")],
    **{name: [(UNEVEN, f"headwise_{name}"), (HALF, f"headwise_{name}")] for name in ENCODERS},
}
"""What loads it: the heads that go, and the model_type that the result has."""

REFUSED = {
    "olmo2": "run over all heads together",
    "gpt2": "has no field for the size of a head",
    "gpt_bigcode": "has no field for the size of a head",
    "gpt_neox": "has no field for the size of a head",
    "opt": "has no field for the size of a head",
    "bart": "has no field for the size of a head",
    "whisper": "has no field for the size of a head",
}
ANY = {0: [0, 2, 3], 1: [1]}  # zeroed heads may be any


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterable[object]:
    """The checkpoint of a family, written once."""
    written: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in written:
            written[family] = saved(FAMILIES[family], tmp_path_factory.mktemp("source") / "model")
        return written[family]

    return of


def gates(heads: Heads, family: str) -> dict[int, Tensor]:
    """1 and 0 for the four heads of each call, by the order of the calls."""
    pairs = FAMILIES[family].kind in ("seq2seq", "speech")
    order = ["encoder.0", "encoder.1", "0", "cross.0", "1", "cross.1"] if pairs else ["0", "1"]
    gone = {str(layer): set(some) for layer, some in heads.items()}
    return {n: torch.tensor([float(h not in gone.get(key, ())) for h in range(4)]) for n, key in enumerate(order)}


def gated(family: str, source: Path, heads: Heads) -> tuple[Tensor, Tensor]:
    """The original's output, with gates on its heads (run on headwise's attention), and without."""
    gate = gates(heads, family)

    def each(call: AttentionCall) -> Tensor:
        return call.attend() * gate[call.order][:, None, None]

    model, arguments = loaded(source), taken(family)
    with probe(model, each):
        switched_off = logits(model, arguments)
    return switched_off, logits(model, arguments)


def taken(family: str) -> dict[str, Tensor]:
    row = FAMILIES[family]
    return inputs(row, "none", masked=row.kind != "vision")


def loaded(folder: Path) -> transformers.PreTrainedModel:
    """As anybody loads it: by the class that config.json names."""
    config = transformers.AutoConfig.from_pretrained(folder)
    cls = proving.class_of(config)
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "output_loading_info": True}
    model, report = quiet(lambda: cls.from_pretrained(folder, **options))
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return model.eval()


def same(actual: Tensor, expected: Tensor, ungated: Tensor) -> None:
    """Equal to float32's rounding, where the gates matter a thousand times more."""
    allowed = 1e-5 * max(1.0, float(expected.abs().max()))
    assert (actual - expected).abs().max() <= allowed
    assert (expected - ungated).abs().max() > 1000 * allowed


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("family", "heads", "model_type"),
    [(family, heads, kind) for family, rows in PRUNED.items() for heads, kind in rows],
    ids=[f"{family}-{n}" for family, rows in PRUNED.items() for n in range(len(rows))],
)
def test_what_is_left_computes_what_the_gated_original_does(
    family: str, heads: Heads, model_type: str, checkpoint: object, tmp_path: Path
) -> None:
    source = checkpoint(family)  # type: ignore[operator]
    with hf.checkpoint(source) as opened:
        plan = plan_prune(opened, heads=heads)
        result = put(plan, tmp_path / "result")
    assert json.loads((result / "config.json").read_text())["model_type"] == model_type
    assert {str(layer): sorted(some) for layer, some in heads.items()} == plan.gone
    same(logits(loaded(result), taken(family)), *gated(family, source, heads))
    before, after = plan.facts()["weight_bytes"]
    assert after < before and after == (result / "model.safetensors").stat().st_size - _header(result)


def test_what_a_model_reads_of_its_config_beside_sizes_stays(checkpoint: object, tmp_path: Path) -> None:
    """The decoder of this family takes the id that it begins with from the config, which does not declare it."""
    with hf.checkpoint(checkpoint("t5")) as opened:  # type: ignore[operator]
        result = put(plan_prune(opened, heads=T5), tmp_path / "result")
    model, ids = loaded(result), torch.tensor([[5, 7, 11]])
    assert model.config.decoder_start_token_id == 1
    assert model(input_ids=ids, labels=ids).loss > 0


def _header(folder: Path) -> int:
    return 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")


@pytest.mark.sweep(4)
@pytest.mark.parametrize("family", [*REFUSED, *ENCODERS, "llama GQA", "t5"])
def test_zeroed_heads_compute_what_the_gated_original_does(family: str, checkpoint: object, tmp_path: Path) -> None:
    source = checkpoint(family)  # type: ignore[operator]
    heads = ANY | ({"encoder.1": [0, 1, 2, 3], "cross.0": [2]} if family in ("bart", "whisper", "t5") else {})
    with hf.checkpoint(source) as opened:
        plan = plan_prune(opened, heads=heads, zero=True)
        result = put(plan, tmp_path / "result")
    before, after = plan.facts()["weight_bytes"]
    assert before == after
    same(logits(loaded(result), taken(family)), *gated(family, source, heads))


@pytest.mark.parametrize("family", REFUSED)
def test_what_no_class_loads_is_refused_with_the_reason_and_the_way_out(family: str, checkpoint: object) -> None:
    heads: Heads = {"olmo2": WITHIN}.get(family, MHA)
    if family in ("bart", "whisper"):
        heads = {f"{role}{n}": [1] for n in range(2) for role in ("", "encoder.", "cross.")}
    source = checkpoint(family)  # type: ignore[operator]
    with hf.checkpoint(source) as opened, pytest.raises(ValueError, match=REFUSED[family]) as caught:
        plan_prune(opened, heads=heads)
    assert "zero=True" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_no_number_of_heads_is_advised_that_loads_no_more_than_the_wish(family: str, checkpoint: object) -> None:
    with hf.checkpoint(checkpoint(family)) as opened:  # type: ignore[operator]
        for wish in ({"heads": MHA}, {"keep_fraction": 0.5, "scores": random_scores()}):
            with pytest.raises(ValueError, match="has no field for the size of a head") as caught:
                plan_prune(opened, **wish)  # type: ignore[arg-type]
            assert not re.search(r"keep \d", str(caught.value))


def test_another_class_does_not_stand_in_for_heads_of_a_size_that_it_cannot_have(checkpoint: object) -> None:
    """One head is all that gpt_bigcode's keys allow, but not of a quarter of the width."""
    source = checkpoint("gpt2")  # type: ignore[operator]
    with hf.checkpoint(source) as opened, pytest.raises(ValueError, match="gpt_bigcode has no field for the size"):
        plan_prune(opened, heads={0: [1, 2, 3], 1: [0, 2, 3]})


@pytest.mark.parametrize("family", [*PRUNED, *REFUSED])
def test_an_edit_of_nothing_changes_no_bit(family: str, checkpoint: object) -> None:
    with hf.checkpoint(checkpoint(family)) as opened:  # type: ignore[operator]
        plan = plan_prune(opened, heads=[])
        assert plan.target.config == opened.config and plan.gone == {}
        made = {planned.name: planned.make() for planned in plan.tensors()}
        assert made.keys() == opened.tensors.keys()
        assert all(torch.equal(tensor, opened.read(name)) for name, tensor in made.items())


@pytest.mark.parametrize("family", [family for family in PRUNED if family != "llama odd"])
def test_parameters_and_cache_are_as_planned(family: str, checkpoint: object, tmp_path: Path) -> None:
    source = checkpoint(family)  # type: ignore[operator]
    heads, _ = PRUNED[family][-1]
    with hf.checkpoint(source) as opened:
        plan = plan_prune(opened, heads=heads)
        result = put(plan, tmp_path / "result")
    facts = plan.facts(context=13)
    if family == "vit":  # the planner knows pictures only beside a text
        assert facts["plan"] == [None, None]
        return
    model = loaded(result)
    assert facts["plan"][1]["parameters"] == sum(weight.numel() for weight in model.parameters())
    if FAMILIES[family].kind != "decoder":
        return
    cache = model(torch.ones(1, 13, dtype=torch.long), use_cache=True)[CACHE]
    size = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    text = model.config.get_text_config()
    windows = any("sliding" in str(kind) for kind in getattr(text, "layer_types", None) or ())
    if not windows and getattr(text, "sliding_window", None) is None:
        assert facts["plan"][1]["cache_bytes"] == size

"""Does a written checkpoint compute what the model with its heads switched off does? In a process of its own.

`proof.py` runs this file: it reads a request (JSON) from stdin, and writes the answer (JSON) to stdout. Both models are
transformers' own, and so is the attention that the original's heads are switched off in. headwise.hf is imported only
for a model whose class it registers (heads by layer), as whoever loads that model has to.
"""

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

GATED = "reshape_gated"
"""The name under which the attention with gates is registered; transformers reads such names for words it knows."""
REGISTERED = "headwise_"
"""How a model_type begins whose class headwise.hf registers."""
OUTPUTS = ("logits", "logits_per_image", "prediction_logits", "start_logits", "last_hidden_state")
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}  # plain operations, in any sizes
SEED = 7
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
SAMPLES = ("The cat sat.", "  def f(x):\n\treturn x + 12345", "Ünïcode: 'naïve', 日本語 🙂", "I'LL don't", "\n\n a  b ")
ENOUGH = 10.0  # seconds of timing
WRITTEN = 4  # tokens of the speed test; `_room` leaves place for them


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What `headwise.hf.load.verify.Proof` tells, as plain data."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    written = json.loads((Path(request["folder"]) / "config.json").read_bytes())
    if str(written.get("model_type")).startswith(REGISTERED):
        import headwise.hf  # noqa: F401
    after, loaded = _load(request["folder"])
    before, own = _build(request["source"]) if request.get("source") else (None, loaded)
    facts: dict[str, Any] = {
        "class": type(after).__name__,
        "transformers": transformers.__version__,
        "missing": sorted(map(str, set(loaded["missing_keys"]) - set(own["missing_keys"]))),
        "unexpected": sorted(map(str, set(loaded["unexpected_keys"]) - set(own["unexpected_keys"]))),
        "parameters": [model and sum(weight.numel() for weight in model.parameters()) for model in (before, after)],
    }
    if before is not None:
        facts["tokenizer"] = _same_ids(request["folder"], before.config, after.config)
    with torch.no_grad():
        inputs = inputs_of(after, request.get("ids"))
        facts["tokens"] = max((x.shape[1] for name, x in inputs.items() if name.endswith("ids")), default=None)
        facts["cache_bytes"] = [model and _cache_bytes(model, inputs) for model in (before, after)]
        facts["loss"] = [model and _loss(model, request) for model in (before, after)]
        if before is not None and request.get("same", True):
            facts |= compare(before, after, inputs, request.get("gates"))  # from here on its heads are switched off
        if request.get("speed"):
            facts["seconds"] = speed([before, after] if before is not None else [after, after])
    return facts


# -- the two models ---------------------------------------------------------------------------------------------------


def _load(folder: str) -> tuple[Any, dict[str, Any]]:
    """The written folder, as anybody loads it, and how it loaded."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    options = {"dtype": torch.float32, "local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    torch.manual_seed(SEED)
    model, report = class_of(config).from_pretrained(folder, **EAGER, **options)
    return model.eval(), report


def _build(source: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The original and how it loaded, from its checked config and weights; nothing else in its folder is read."""
    import torch
    from safetensors.torch import load_file
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[source["config"]["model_type"]].from_dict(dict(source["config"]))
    state = {name: tensor for file in source["weights"] for name, tensor in load_file(file).items()}
    options = {"config": config, "state_dict": state, "dtype": torch.float32, "output_loading_info": True}
    torch.manual_seed(SEED)
    model, report = class_of(config).from_pretrained(None, **EAGER, **options)
    return model.eval(), report


def _same_ids(folder: str, before: Any, after: Any) -> bool | None:
    """Whether the folder's tokenizer gives the ids it gave; None where no other class of model might change that.

    transformers picks the class of a tokenizer by that of the model.
    """
    import transformers

    if type(before) is type(after) or not any((Path(folder) / name).exists() for name in VOCABULARIES):
        return None
    ids = []
    for config in (before, after):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, config=config, local_files_only=True)
        ids.append([tokenizer(text)["input_ids"] for text in SAMPLES])
    return bool(ids[0] == ids[1])


def class_of(config: Any) -> Any:
    """The class that the config names, or the plain model."""
    import transformers

    for name in config.architectures or ():
        for room in (transformers, sys.modules[type(config).__module__]):
            if isinstance(getattr(room, name, None), type):
                return getattr(room, name)
    return transformers.AutoModel._model_mapping[type(config)]


# -- the same output --------------------------------------------------------------------------------------------------


def compare(before: Any, after: Any, inputs: dict[str, Any], gates: list[list[int]] | None) -> dict[str, Any]:
    """The largest difference between the two outputs, the original's heads gated, and how large those are."""
    expected = _output(before, inputs) if gates is None else _output(gated(before, gates), inputs)
    actual = _output(after, inputs)
    return {
        "difference": float((expected - actual).abs().max()),
        "largest": float(expected.abs().max()),
        "identical": bool((expected == actual).all()),
    }


def gated(model: Any, gates: list[list[int]]) -> Any:
    """The model with a factor on each head's output, by the order in which its layers attend."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    order: dict[Any, int] = {}

    def attend(module: Any, query: Any, *rest: Any, **options: Any) -> Any:
        eager = sys.modules[type(module).__module__].eager_attention_forward  # as if no name were set
        out, weights = eager(module, query, *rest, **options)
        gate = torch.tensor(gates[order.setdefault(module, len(order))], dtype=out.dtype, device="cpu")
        if len(gate) != query.shape[1]:
            raise RuntimeError(f"layer {len(order) - 1} attends with {query.shape[1]} heads, and {len(gate)} are gated")
        return out * gate[:, None], weights

    AttentionInterface.register(GATED, attend)
    AttentionMaskInterface.register(GATED, eager_mask)
    model.set_attn_implementation(GATED)
    for part in model.modules():  # halves of an encoder-decoder have configs of their own
        if hasattr(getattr(part, "config", None), "_attn_implementation"):
            part.config._attn_implementation_internal = GATED
    return model


def _output(model: Any, inputs: dict[str, Any]) -> Any:
    out = model(**inputs)
    name = next((name for name in OUTPUTS if name in out), None)
    if name is None:
        raise ValueError(f"it gives none of {', '.join(OUTPUTS)} to be compared")
    return out[name]


def inputs_of(model: Any, ids: list[int] | None) -> dict[str, Any]:
    """Something that the model reads: the given ids, else two rows of random ones; random sound, a random image."""
    import torch

    config, draw = model.config, torch.Generator().manual_seed(SEED)
    inputs: dict[str, Any] = {}
    kinds = [model.main_input_name] + ["decoder_input_ids"] * bool(config.is_encoder_decoder)
    for name in kinds:
        if name == "pixel_values":
            size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
            inputs[name] = torch.randn(2, config.num_channels, size, size, generator=draw, device="cpu")
        elif name == "input_features":
            length = 2 * config.max_source_positions
            inputs[name] = torch.randn(2, config.num_mel_bins, length, generator=draw, device="cpu")
        elif ids is not None and name == "input_ids":
            inputs[name] = torch.tensor([ids[: _room(config, 128)]], device="cpu")
        else:
            rows = 1 if ids is not None else 2
            inputs[name] = words(config, (rows, _room(config, 24)), draw)
    return inputs


def words(config: Any, shape: tuple[int, int], draw: Any) -> Any:
    """Random ids of words; those with a meaning of their own (an image's place, say) are left out."""
    import torch

    named = (n for key, n in config.to_dict().items() if key.endswith(("_token_id", "_token_index")))
    special = {n for some in named for n in (some if isinstance(some, list) else [some])}
    free = torch.tensor([n for n in range(config.get_text_config().vocab_size) if n not in special], device="cpu")
    return free[torch.randint(len(free), shape, generator=draw, device="cpu")]


def _room(config: Any, wanted: int) -> int:
    """How many tokens a text may have here: `wanted`, or what the model has positions for, some put aside."""
    config = config.get_text_config()
    positions = getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None)
    return max(2, min(wanted, (positions or wanted) - 4))


# -- what it costs, and what it says ----------------------------------------------------------------------------------


def _decodes(model: Any) -> bool:
    return bool(model.can_generate()) and not model.config.is_encoder_decoder


def _cache_bytes(model: Any, inputs: dict[str, Any]) -> int | None:
    """Bytes of the cache after one text of that length, in float32; None for a model that keeps none."""
    if not _decodes(model):
        return None
    cache = next(iter(_cache_of(model(inputs["input_ids"][:1], use_cache=True)).values()))
    if cache is None:  # an encoder's layers under a head for the next word
        return None
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))


def _cache_of(out: Any) -> dict[str, Any]:
    """The cache that a model gives, as an argument for its next call: since transformers 5.24 it is called `cache`."""
    name = "cache" if "cache" in out else "past_key_values"
    return {name: out.get(name)}


def _loss(model: Any, request: dict[str, Any]) -> float | None:
    """Cross-entropy a token on the text: of the next token, or of one in seven that is masked; None without a text."""
    import torch
    from torch.nn.functional import cross_entropy

    ids, mask_id = request.get("ids"), request.get("mask_id")
    masks = type(model).__name__.endswith("ForMaskedLM") and mask_id is not None
    if not ids or not (masks or _decodes(model)) or len(ids) < 8:
        return None
    length, total, count = _room(model.config, 512), 0.0, 0
    for start in range(0, len(ids), length):
        row = torch.tensor([ids[start : start + length]], device="cpu")
        if row.shape[1] < 8:
            break
        hidden: Any = slice(0, -1)
        if mask_id is not None and masks:
            hidden = torch.arange(row.shape[1], device="cpu") % 7 == 3
            read, wanted = row.masked_fill(hidden, mask_id), row[:, hidden]
        else:
            read, wanted = row, row[:, 1:]
        logits = model(read).logits[:, hidden].float()
        total += float(cross_entropy(logits[0], wanted[0], reduction="sum"))
        count += wanted.numel()
    return total / count


def speed(models: list[Any]) -> dict[str, Any]:
    """Seconds of each model, by turns: to read a text, and for each token that it then writes; the middle of five."""
    import torch

    for model in models:
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    one = models[0]
    if one.main_input_name != "input_ids" or one.config.is_encoder_decoder:
        inputs = inputs_of(one, None)
        return {"read": _times(models, lambda model: None, lambda model, _: model(**inputs))}
    length = _room(one.config, 256)
    draw = torch.Generator().manual_seed(SEED)
    ids = words(one.config, (1, length), draw)
    seconds = {"tokens": length, "read": _times(models, lambda model: None, lambda model, _: model(ids))}
    if _decodes(one):
        seconds["write"] = [t / WRITTEN for t in _times(models, lambda model: model(ids, use_cache=True), _write)]
    return seconds


def _write(model: Any, out: Any) -> None:
    """A few more tokens behind those that were read."""
    for _ in range(WRITTEN):
        last = out.logits[:, -1:].argmax(-1)
        out = model(last, **_cache_of(out), use_cache=True)


def _times(models: list[Any], prepare: Any, run: Any) -> list[float]:
    """The median of five runs of each model, by turns, after one that warms up; what prepares a run is not counted.

    Of a large model there are fewer runs: no more begin once they have taken long enough.
    """
    taken: list[list[float]] = [[] for _ in models]
    began = time.perf_counter()
    for turn in range(6):
        if turn > 1 and time.perf_counter() - began > ENOUGH:
            break
        for model, times in zip(models, taken, strict=True):
            ready = prepare(model)
            start = time.perf_counter()
            run(model, ready)
            times += [time.perf_counter() - start] if turn else []
    return [median(times) for times in taken]


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr  # what other libraries print is no part of the answer
    try:
        report = answer(json.loads(sys.stdin.buffer.read()))
    except Exception as error:
        report = {"error": f"{type(error).__name__}: {error}"}
    out.write(json.dumps(report))

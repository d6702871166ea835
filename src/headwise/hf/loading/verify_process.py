"""The process that compares a written checkpoint with the original model whose heads are switched off.

`verify.py` runs this file: it reads a request (JSON) from stdin and writes the answer (JSON) to stdout. Both models
and their attention are transformers' own, also where heads are switched off. headwise.hf is imported only for a model
class that it registers (heads by layer), because every user of such a model has to import it.
"""

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

GATED = "reshape_gated"
"""The registered name of the attention with gates. transformers searches names for words like "sdpa"; it has none."""
REGISTERED = "headwise_"
"""The prefix of each model_type that headwise.hf registers."""
OUTPUTS = ("logits", "logits_per_image", "prediction_logits", "start_logits", "last_hidden_state")
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}  # Plain operations run in all sizes.
SEED = 7
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
SAMPLES = ("The cat sat.", "  def f(x):\n\treturn x + 12345", "Ünïcode: 'naïve', 日本語 🙂", "I'LL don't", "\n\n a  b ")
ENOUGH = 10.0  # seconds of timing after which no further run starts
WRITTEN = 4  # tokens that the speed test generates; `_room` leaves positions for them


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the report that `headwise.reshape.write.verify.require` checks, as plain data."""
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
            facts |= compare(before, after, inputs, request.get("gates"))  # This switches off heads of `before`.
        if request.get("speed"):
            facts["seconds"] = speed([before, after] if before is not None else [after, after])
    return facts


# -- the two models ---------------------------------------------------------------------------------------------------


def _load(folder: str) -> tuple[Any, dict[str, Any]]:
    """Load the model of the written folder with `from_pretrained`; return it and its loading report."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    options = {"dtype": torch.float32, "local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    torch.manual_seed(SEED)
    model, report = class_of(config).from_pretrained(folder, **EAGER, **options)
    return model.eval(), report


def _build(source: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Build the original from its checked config and weights, and no other file; return it and its loading report."""
    import torch
    from safetensors.torch import load_file
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    def number(entry: dict[str, Any]) -> Any:  # Infinity, as transformers writes it
        return float(entry["__float__"]) if set(entry) == {"__float__"} else entry

    plain = json.loads(json.dumps(source["config"]), object_hook=number)
    config = CONFIG_MAPPING[plain["model_type"]].from_dict(plain)
    state = {name: tensor for file in source["weights"] for name, tensor in load_file(file).items()}
    options = {"config": config, "state_dict": state, "dtype": torch.float32, "output_loading_info": True}
    torch.manual_seed(SEED)
    model, report = class_of(config).from_pretrained(None, **EAGER, **options)
    return model.eval(), report


def _same_ids(folder: str, before: Any, after: Any) -> bool | None:
    """Return whether the folder's tokenizer gives the same ids with both configs; None if nothing has to be checked.

    transformers selects the tokenizer class by the config, so the ids can change only if the config class changed.
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
    """Return the model class that the config names, or else the base model class."""
    import transformers

    for name in config.architectures or ():
        for room in (transformers, sys.modules[type(config).__module__]):
            if isinstance(getattr(room, name, None), type):
                return getattr(room, name)
    return transformers.AutoModel._model_mapping[type(config)]


# -- the same output --------------------------------------------------------------------------------------------------


def compare(before: Any, after: Any, inputs: dict[str, Any], gates: list[list[int]] | None) -> dict[str, Any]:
    """Return the largest difference from the outputs of the gated original, and the largest of these outputs."""
    expected = _output(before, inputs) if gates is None else _output(gated(before, gates), inputs)
    actual = _output(after, inputs)
    return {
        "difference": float((expected - actual).abs().max()),
        "largest": float(expected.abs().max()),
        "identical": bool((expected == actual).all()),
    }


def gated(model: Any, gates: list[list[int]]) -> Any:
    """Multiply the output of each head by its gate, for layers in the order of execution, and return the model."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    order: dict[Any, int] = {}

    def attend(module: Any, query: Any, *rest: Any, **options: Any) -> Any:
        eager = sys.modules[type(module).__module__].eager_attention_forward  # The default of the model's file.
        out, weights = eager(module, query, *rest, **options)
        gate = torch.tensor(gates[order.setdefault(module, len(order))], dtype=out.dtype, device="cpu")
        if len(gate) != query.shape[1]:
            raise RuntimeError(f"layer {len(order) - 1} attends with {query.shape[1]} heads, and {len(gate)} are gated")
        return out * gate[:, None], weights

    AttentionInterface.register(GATED, attend)
    AttentionMaskInterface.register(GATED, eager_mask)
    model.set_attn_implementation(GATED)
    for part in model.modules():  # The encoder and the decoder of one model have separate configs.
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
    """Return inputs of the model: the given ids, or else two rows of random ids; random audio, random images."""
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
    """Return random ids; special tokens (such as the image token) are left out."""
    import torch

    named = (n for key, n in config.to_dict().items() if key.endswith(("_token_id", "_token_index")))
    special = {n for some in named for n in (some if isinstance(some, list) else [some])}
    free = torch.tensor([n for n in range(config.get_text_config().vocab_size) if n not in special], device="cpu")
    return free[torch.randint(len(free), shape, generator=draw, device="cpu")]


def _room(config: Any, wanted: int) -> int:
    """Return the number of tokens for a test text: at most `wanted`, and at most the model's positions less 4."""
    config = config.get_text_config()
    positions = getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None)
    return max(2, min(wanted, (positions or wanted) - 4))


# -- cache, loss and speed --------------------------------------------------------------------------------------------


def _decodes(model: Any) -> bool:
    return bool(model.can_generate()) and not model.config.is_encoder_decoder


def _cache_bytes(model: Any, inputs: dict[str, Any]) -> int | None:
    """Return the bytes of the float32 cache after the first row of the ids; None for a model without a cache."""
    if not _decodes(model):
        return None
    cache = next(iter(_cache_of(model(inputs["input_ids"][:1], use_cache=True)).values()))
    if cache is None:  # An encoder with a language-model head has no cache.
        return None
    kept = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(x.nbytes for x in kept if x is not None)  # a recurrent layer, or one without attention, has neither


def _cache_of(out: Any) -> dict[str, Any]:
    """Return the cache in a model's output as a keyword for its next call; transformers 5.24 renamed it to `cache`."""
    name = "cache" if "cache" in out else "past_key_values"
    return {name: out.get(name)}


def _loss(model: Any, request: dict[str, Any]) -> float | None:
    """Return the mean cross-entropy of the next token, or of each seventh token if masked; None without a text."""
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
    """Return the median seconds of each model to read a text and to generate a token; the models run alternately."""
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
    """Generate WRITTEN tokens after those that were read."""
    for _ in range(WRITTEN):
        last = out.logits[:, -1:].argmax(-1)
        out = model(last, **_cache_of(out), use_cache=True)


def _times(models: list[Any], prepare: Any, run: Any) -> list[float]:
    """Return the median of five alternating runs of each model after a warm-up run; `prepare` is not timed.

    A large model gets fewer runs, because no further round starts after ENOUGH seconds.
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
    out, sys.stdout = sys.stdout, sys.stderr  # Other libraries may print, but stdout must hold only the answer.
    try:
        report = answer(json.loads(sys.stdin.buffer.read()))
    except Exception as error:
        report = {"error": f"{type(error).__name__}: {error}"}
    out.write(json.dumps(report))

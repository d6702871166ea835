"""Random configs of every architecture the planner knows, the models transformers builds of them, and their counts."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import plan_draws
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from headwise.hf.models.architectures import CACHE
from headwise.plan.config.fields import architectures
from headwise.plan.costs import totals as costs
from headwise.plan.model.model import Model, model_of

TOKENS, BATCH, FLOAT32 = 13, 2, 4
OWN_CACHES = ("minimax", "deepseek_v4")  # takes no fixed cache
KEEPS_ALL = "gpt_neo"  # transformers keeps the whole context of its local layers, as its note says
LAST_TOKEN_ONLY = ("gemma4_text",)  # its layers without keys, where only the last logits are asked for
IDS: dict[str, int] = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
ROUTING: dict[str, int] = dict(n_group=1, topk_group=1)  # which experts a token may choose from, not how many
SINGLE = [name for name, about in architectures().items() if "text" not in about]
CACHED = [name for name in SINGLE if architectures()[name].get("stack") != "encoder"]


def random_config(name: str, dice: random.Random, *, runs: bool = False) -> dict[str, Any]:
    """A small valid config: every field that counts is drawn, or left out where it may be.

    `runs`: not only built, but run: rotary positions then want even parts of a head, and some code heads in fours.
    """
    about = architectures()[name]
    standard = {own: usual for usual, own in about.get("names", {}).items()}
    heads = dice.choice([4, 8] if name == "codegen" else [1, 2, 3, 4, 6, 8])
    step = 8 if runs else 2
    sizes = {
        "heads": heads,
        "kv_heads": dice.choice([k for k in range(1, heads + 1) if heads % k == 0]),
        "width": heads * step * dice.choice([1, 2, 3] if runs else [2, 3, 5, 7, 8]),
        "step": step,
        "layers": dice.choice([1, 2, 3, 4]),
    }
    config: dict[str, Any] = {}
    for field, default in about["defaults"].items():
        usual = standard.get(field, field)
        if default is None and field in MAY_BE_ABSENT and name not in NEVER_ABSENT and dice.random() < 0.15:
            continue
        config[field] = _value(field, usual, default, about, sizes, dice)
    if runs and "side_by_side" in about:  # what can be built there and not run: norms that no layer calls
        config["parallel_attn"] = config["parallel_attn"] or config["new_decoder_architecture"]
        config["num_ln_in_parallel_attn"] = None if config["new_decoder_architecture"] else 1
        config["num_kv_heads"] = sizes["kv_heads"] if config["new_decoder_architecture"] else None
    return plan_draws.possible(name, about, config, dice)


MAY_BE_ABSENT = (
    "num_key_value_heads", "num_kv_heads", "intermediate_size", "n_inner", "ffn_hidden_size", "num_decoder_layers",
    "q_lora_rank", "num_ln_in_parallel_attn",
)  # fmt: skip
NEVER_ABSENT = ("nemotron",)  # transformers' own default of None cannot be built there


def _value(
    field: str, usual: str, default: Any, about: dict[str, Any], sizes: dict[str, int], dice: random.Random
) -> Any:
    heads, width, layers = sizes["heads"], sizes["width"], sizes["layers"]
    exact = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if about.get("latent") else sizes["kv_heads"],
        "use_sliding_window": True,  # off, a sliding layer would have no window
        "attention_types": [[["global", "local"], layers // 2], [["global"], layers % 2]],
        "no_rope_layers": None,
        "mlp_only_layers": [dice.randint(0, 3)],
        **plan_draws.values(field, about, sizes, dice),
        "num_experts_per_tok": about.get("must", {}).get("num_experts_per_tok", dice.randint(1, 2)),
    }
    if field == "num_heads" and "head_dim" in about.get("names", {}):
        return heads
    if usual in exact:
        return exact[usual]
    if field in exact:
        return exact[field]
    if field == "type_vocab_size":  # without any where that is the class's own default
        return dice.choice([default and 1, 2, 3])
    if field in CHOICES:
        return dice.choice(CHOICES[field])
    if field == "moe_layers":
        return dice.choice([None, [i for i in range(layers) if dice.random() < 0.5]])
    if field == "layer_types":
        word = about.get("windows", {}).get("word", "sliding_attention")
        word = about.get("states", {}).get("word", word)
        kinds = ["full_attention", word] if {"windows", "states"} & set(about) else ["full_attention"]
        kinds = [about["layer_word"]] if "layer_word" in about else kinds
        return dice.choice([None, [dice.choice(kinds) for _ in range(layers - 1)] + kinds[:1]])
    if field == "mamba_n_heads":
        return dice.choice([heads for heads in (2, 4) if width % heads == 0])
    if field == "full_attention_interval":
        return dice.randint(1, layers)
    if field == "attn_layer_indices" or field == "full_attn_idxs":
        return sorted({dice.randrange(layers), dice.randrange(layers)})
    if isinstance(default, bool):
        return dice.random() < 0.5
    if field in ("mamba_d_conv", "linear_conv_kernel_dim", "conv_L_cache"):
        return dice.randint(2, 5)
    if isinstance(default, str):
        return dice.choice(["relu", "gated-gelu", "gelu", "gated-silu"])
    if usual in ("encoder_heads", "decoder_heads"):
        return dice.choice([h for h in range(1, heads + 1) if heads % h == 0])
    if usual == "head_dim":
        return width // heads if about.get("square_o") else sizes["step"] * dice.randint(1, 5)
    if usual in ("qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank"):
        return 2 * dice.randint(1, 5)
    least, most = plan_draws.RANGES.get(usual, (2, 30))
    return dice.randint(least, most)


CHOICES: dict[str, list[Any]] = {
    "pos_att_type": [None, ["c2p"], ["p2c"], ["c2p", "p2c"], "p2c|c2p"],
    "max_relative_positions": [-1, 3, 5, 40],
    "position_buckets": [-1, 2, 4],
    "norm_rel_ebd": ["none", "layer_norm"],
    "conv_kernel_size": [0, 3],
    "conv_groups": [1],
    "num_ln_in_parallel_attn": [1, 2],
    "attn_layer_period": [2, 3],
    "attn_layer_offset": [0],
    "expert_layer_period": [2, 3],
    "expert_layer_offset": [0, 1],
    "mamba_dt_rank": ["auto", 3, 5],
    "mamba_d_head": ["auto"],
    "mamba_n_groups": [1, 2],
    "mamba_d_ssm": [None, 24, 32],
    "mamba_expand": [1, 2],
    "linear_num_key_heads": [1, 2],
    "linear_num_value_heads": [2, 4],
    "block_multiple_of": [1, 4],
    "block_ffn_dim_multiplier": [1.0, 0.8, 2],
}


def config_of(name: str, fields: dict[str, Any]) -> Any:
    """transformers' config of those fields; special tokens are put inside of small vocabularies."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    known = inspect.signature(kind).parameters
    more = {key: value for key, value in {**IDS, **ROUTING}.items() if key in known and key not in fields}
    if "rotary_dim" in known and "rotary_dim" not in fields:
        more["rotary_dim"] = 4
    if "decoder_start_token_id" in known:
        more["decoder_start_token_id"] = 1
    return kind(**fields, **more)


def build(name: str, config: Any, *, head: bool = True, device: str = "meta") -> Any:
    """The model, with random weights; on the meta device it holds none."""
    kind = getattr(transformers, architectures()[name]["classes"]["lm" if head else "base"])
    with torch.device(device):
        return kind._from_config(config, attn_implementation="eager", experts_implementation="eager").eval()


def parameters_of(name: str, config: Any, *, head: bool = True) -> int:
    """What transformers' model has, shared ones once."""
    return sum(parameter.numel() for parameter in build(name, config, head=head).parameters())


def strange_fields(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Fields that count in some architecture and that this config lacks: code may look for them all the same."""
    union: dict[str, Any] = {}
    for about in architectures().values():
        union = {**about.get("defaults", {}), **about.get("must", {}), **union}
    for name, value in union.items():
        if name not in fields and not isinstance(value, (str, list)):
            yield from ({name: other} for other in ((True, False) if isinstance(value, bool) else (3,)))


def strange_and_wrong(name: str, fields: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """Which strange fields are silently wrong: eight at once, one by one only where those change or break something."""
    waiting = list(strange_fields(fields))
    faults: list[dict[str, Any]] = []
    while waiting:
        group, rest, more = [], [], {}
        for one in waiting:  # a field is in a group once, for it may have two values
            (group if len(group) < 8 and not one.keys() & more.keys() else rest).append(one)
            more |= one if one in group else {}
        waiting = rest
        try:
            same = parameters_of(name, config_of(name, {**fields, **more})) == size
        except Exception:
            same = False
        faults += [] if same else [one for one in group if silently_wrong(name, fields, one, size)]
    return faults


def silently_wrong(name: str, fields: dict[str, Any], more: dict[str, Any], size: int) -> bool:
    """Whether fields added to a config change transformers' model, of that size, and the plan passes over it.

    Fields that transformers cannot build with are no fault of the plan.
    """
    try:
        theirs = parameters_of(name, config_of(name, {**fields, **more}))
    except Exception:
        return False
    if theirs == size:
        return False
    try:
        ours = model_of({**fields, **more, "model_type": name})
    except ValueError:
        return False
    return not ours.notes and ours.total_parameters() != theirs


# --- operations -------------------------------------------------------------------------------------------------------


class Matmuls(TorchDispatchMode):
    """Counts the FLOPs of every matrix product and convolution that runs, to the unit.

    Products over an inner axis of 1 are no sums of products but scalings (rotary angles), and are left out. Given a
    model, only products with its parameters are counted, and no convolutions: what moves a state is not in the plan.
    """

    def __init__(self, model: Any = None) -> None:
        super().__init__()
        self.flops = 0
        self.only = None if model is None else {p.untyped_storage().data_ptr() for p in model.parameters()}

    def _counts(self, args: Any) -> bool:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        return self.only is None or any(t.untyped_storage().data_ptr() in self.only for t in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not self._counts(args) or (self.only is not None and name == "convolution"):
            return out
        if name in ("mm", "bmm"):
            self.flops += _product(out, args[0])
        elif name in ("addmm", "baddbmm"):
            self.flops += _product(out, args[1])
        elif name == "convolution":
            self.flops += 2 * out.numel() * args[1][0].numel()
        elif name in ("mv", "dot", "addbmm", "addmv", "_scaled_dot_product_flash_attention_for_cpu"):
            raise AssertionError(f"{name} is a product that is not counted")
        return out


def _product(out: torch.Tensor, left: torch.Tensor) -> int:
    return 0 if left.shape[-1] == 1 else 2 * out.numel() * left.shape[-1]


@contextmanager
def counted(model: Any = None) -> Iterator[Matmuls]:
    with torch.no_grad(), Matmuls(model) as seen:
        yield seen


def with_parameters(cost: costs.Flops, ours: Model, passes: int) -> int:
    """Of those operations the products with parameters: not attention's, nor convolutions of layers with a state."""
    convolved = sum(part.macs for layer in ours.states for part in layer.parts() if part.name == "conv")
    return cost.projections + cost.rest - 2 * passes * convolved


def inputs_of(name: str, config: Any, tokens: int, *, batch: int = 1, source: int | None = None) -> dict[str, Any]:
    """Token ids (and frames of sound, or a source text) for a forward pass; the head sees the last token only."""
    about = architectures()[name]
    ids = torch.randint(3, config.vocab_size, (batch, tokens))
    if "audio" in about:
        frames = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": frames, "decoder_input_ids": ids}
    if about.get("stack") == "pair":
        return {"input_ids": torch.randint(3, config.vocab_size, (batch, source or tokens)), "decoder_input_ids": ids}
    return {"input_ids": ids}


# --- caches -----------------------------------------------------------------------------------------------------------


def bytes_held(cache: Any) -> int:
    """Bytes of all keys and values in a transformers cache, self- and cross-attention's."""
    if hasattr(cache, "self_attention_cache"):
        return bytes_held(cache.self_attention_cache) + bytes_held(cache.cross_attention_cache)
    tensors = [t for layer in cache.layers for t in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    for layer in cache.layers:
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            tensors += states.values()
        tensors.append(getattr(layer, "indexer_keys", None))
        tensors += getattr(layer, "compressed_kv", {}).values()
    tensors += getattr(cache, "linear_cache", [])
    own = {id(t): t for t in tensors if isinstance(t, torch.Tensor)}  # keys that are values are one tensor
    return sum(t.numel() * t.element_size() for t in own.values())


def dynamic_cache_bytes(name: str, config: Any, model: Any, tokens: int) -> int:
    """What transformers' growing cache holds after `tokens` were read, the last one alone."""
    with torch.no_grad():
        first = model(**inputs_of(name, config, tokens - 1, source=tokens), use_cache=True)
        inputs = inputs_of(name, config, 1, source=tokens)
        if "decoder_input_ids" in inputs:
            inputs = {
                "encoder_outputs": (first.encoder_last_hidden_state,),
                "decoder_input_ids": inputs["decoder_input_ids"],
            }
        return bytes_held(model(**inputs, **{CACHE: first[CACHE]}, use_cache=True)[CACHE])


def static_cache_bytes(name: str, config: Any, model: Any, tokens: int) -> int:
    """What transformers' fixed cache sets aside for `tokens`."""
    cache = transformers.StaticCache(config=config, max_cache_len=tokens)
    with torch.no_grad():
        model(**inputs_of(name, config, 3), **{CACHE: cache}, use_cache=True)
    return bytes_held(cache)


def as_run(name: str, ours: Model, config: Any) -> Model:
    """The model as transformers runs it where that is more, as the notes say: all experts, key-value heads repeated."""
    if name == "llama4_text":
        all_experts, used = config.num_local_experts, config.num_experts_per_tok
        others = tuple(
            replace(part, macs=part.macs * all_experts // used) if part.name == "experts" else part
            for part in ours.others
        )
        return replace(ours, others=others)
    if "shared_key" in architectures()[name]:  # attention is computed over all compressed keys, and masked
        layers = []
        for layer in ours.layers:
            one = layer.compressor
            if one is not None and one.indexer is not None:
                every = replace(one, indexer=replace(one.indexer, top_k=TOKENS))
                assert layer.shared_key is not None
                layer = replace(layer, shared_key=replace(layer.shared_key, compressor=every))
            layers.append(layer)
        return replace(ours, layers=tuple(layers))
    if getattr(config, "new_decoder_architecture", False):
        return replace(ours, layers=tuple(replace(layer, num_kv_heads=layer.num_heads) for layer in ours.layers))
    return ours


# --- ours against theirs ----------------------------------------------------------------------------------------------


def compared_prefill(name: str, ours: Model, config: Any, real: Any) -> tuple[int, int]:
    """FLOPs of reading `TOKENS` tokens without a mask's savings, as planned and as counted."""
    last_only = "logits_to_keep" in inspect.signature(real.forward).parameters and not ours.is_encoder
    last_only &= name not in LAST_TOKEN_ONLY
    inputs = inputs_of(name, config, TOKENS, batch=BATCH)
    with counted(real if ours.states else None) as seen:
        real(**inputs, **({"logits_to_keep": 1} if last_only else {}))
    cost = costs.prefill(as_run(name, ours, config) if "moe" in architectures()[name] else ours, TOKENS, batch=BATCH)
    head = sum(part.macs for part in ours.others if part.name == "lm_head")
    if ours.states:
        assert last_only
        return with_parameters(cost, ours, BATCH * TOKENS), seen.flops
    all_logits = 0 if last_only or ours.is_encoder else 2 * BATCH * (TOKENS - 1) * head
    index = sum(layer.index_macs(TOKENS, TOKENS, masked=False) for layer in ours.layers)
    index -= TOKENS * plan_draws.weighted_by_elements(ours, TOKENS)
    return cost.projections + cost.dense + cost.rest + 2 * BATCH * index + all_logits, seen.flops


def compared_decode(name: str, ours: Model, config: Any, real: Any) -> tuple[int, int]:
    """FLOPs of one token on top of a cache, as planned and as counted."""
    with torch.no_grad():
        first = real(**inputs_of(name, config, TOKENS - 1, batch=BATCH, source=TOKENS), use_cache=True)
    inputs = inputs_of(name, config, 1, batch=BATCH)
    if "decoder_input_ids" in inputs:
        memory = (first.encoder_last_hidden_state,)
        inputs = {"encoder_outputs": memory, "decoder_input_ids": inputs["decoder_input_ids"]}
    with counted(real if ours.states else None) as seen:
        real(**inputs, **{CACHE: first[CACHE]}, use_cache=True)
    cost = costs.decode(
        as_run(name, ours, config) if "moe" in architectures()[name] else ours, TOKENS, batch=BATCH, absorbed=False
    )
    if ours.states and cost is not None:
        return with_parameters(cost, ours, BATCH), seen.flops
    return 0 if cost is None else cost.total - 2 * BATCH * plan_draws.weighted_by_elements(ours, TOKENS), seen.flops


def compared_caches(name: str, ours: Model, config: Any, real: Any) -> list[tuple[int, int]]:
    """Bytes as planned and as held: by growing caches of two lengths, then by a fixed one where there is one stack.

    Between two steps a growing cache keeps one token less than a window holds during a step.
    """
    windowed, ours = name != KEEPS_ALL, as_run(name, ours, config)
    between = replace(ours, layers=tuple(replace(one, window=one.window and one.window - 1) for one in ours.layers))
    pairs = []
    states = costs.state_bytes(replace(ours, weight_bytes=FLOAT32))
    for tokens in (3, TOKENS):
        planned = states + costs.cache_bytes(between, tokens, FLOAT32, windowed=windowed)
        pairs.append((planned, dynamic_cache_bytes(name, config, real, tokens)))
    if architectures()[name].get("stack") != "pair" and name not in OWN_CACHES:
        planned = states + costs.cache_bytes(ours, TOKENS, FLOAT32, windowed=windowed)
        pairs.append((planned, static_cache_bytes(name, config, real, TOKENS)))
    return pairs

"""The size of the quantised matrices of a checkpoint, including their scales and zeros."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..shape import check_size, short
from .parts import Part

PLAIN = {"router", "shared_gate", "join", "lm_head", "project_in", "project_out"}  # matrices that no method packs
ROOMS = ("attention", "mlp", "state")
KEPT = ("lm_head", "embed", "norm", "router", "gate", "visual", "vision", "multi_modal", "wte", "ln_f")


@dataclass(frozen=True)
class Packing:
    """The storage format of the matrices of a checkpoint.

    Attributes:
        method: The name in the config.
        matrix: A function from (inputs, outputs) to the bytes of one matrix with its scales and zeros.
        experts_only: True if only the experts of a mixture are packed.
    """

    method: str
    matrix: Callable[[int, int], int]
    experts_only: bool = False

    def packs(self, part: Part) -> bool:
        """Return whether the part's matrices are stored packed."""
        if self.experts_only:
            return part.name == "experts"
        return part.room in ROOMS and part.name not in PLAIN and bool(part.matrices)

    def bytes(self, part: Part, number_bytes: int) -> int:
        """Return the bytes of a part: packed matrices, and everything else in the model's dtype."""
        if not self.packs(part) or not part.parameters:
            return part.parameters * number_bytes
        inside = sum(inputs * outputs * copies for inputs, outputs, copies in part.matrices)
        packed = sum(self.matrix(inputs, outputs) * copies for inputs, outputs, copies in part.matrices)
        return packed + (part.parameters - inside) * number_bytes


def packing_of(config: Mapping[str, Any]) -> tuple[Packing | None, str | None]:
    """Return the packing of a config's ``quantization_config`` and a note; None if there is none or it is unsupported.

    Raises:
        ValueError: a field of a supported method has an invalid value.
    """
    about = config.get("quantization_config")
    if about is None or about == {}:
        return None, None
    if not isinstance(about, Mapping):
        raise ValueError(f"quantization_config is an object; got {short(about)}")
    method = about.get("quant_method")
    make = _METHODS.get(method) if isinstance(method, str) else None
    if make is None:
        return (
            None,
            f"the checkpoint is quantised by {short(method)}: the bytes of weights are those of unquantised weights",
        )
    try:
        matrix = make(about)
    except TypeError as wrong:
        raise ValueError(f"quantization_config: {wrong}") from None
    skipped = about.get("modules_to_not_convert") or about.get("ignore") or about.get("llm_int8_skip_modules") or []
    names = [name for name in skipped if isinstance(name, str)] if isinstance(skipped, list) else []
    other = [name for name in names if not any(word in name for word in KEPT)]
    experts_only = method == "mxfp4"
    note = None
    if other and not experts_only:
        note = f"weights that the checkpoint leaves unquantised are counted as quantised: {short(other[0])}"
    return Packing(str(method), matrix, experts_only), note


def _number(about: Mapping[str, Any], name: str, default: int) -> int:
    value = about.get(name, default)
    check_size(name, value)
    return int(value)


def _groups(about: Mapping[str, Any], default: int) -> Callable[[int], int]:
    """Return a function from the inputs of a row to its number of groups; a size of -1 or null is one group."""
    size = about.get("group_size", default)
    if size in (-1, None):
        return lambda inputs: 1
    size = _number(about, "group_size", default)
    return lambda inputs: -(-inputs // size)


def _fp8(about: Mapping[str, Any]) -> Callable[[int, int], int]:
    """Return the size for one byte per weight and a float32 per block."""
    block = about.get("weight_block_size")
    if block is None:
        return lambda inputs, outputs: inputs * outputs + 4
    if not isinstance(block, list) or len(block) != 2:
        raise ValueError(f"quantization_config: weight_block_size is two whole numbers; got {short(block)}")
    for size in block:
        check_size("weight_block_size", size)
    return lambda inputs, outputs: inputs * outputs + 4 * -(-outputs // block[0]) * -(-inputs // block[1])


def _gptq(about: Mapping[str, Any]) -> Callable[[int, int], int]:
    """Return the size for bits packed along the inputs in 32-bit words; scales (2 bytes), zeros and group indices."""
    bits, groups = _number(about, "bits", 4), _groups(about, 128)

    def bytes_of(inputs: int, outputs: int) -> int:
        many = groups(inputs)
        zeros = many * 4 * -(-outputs * bits // 32)
        return 4 * -(-inputs * bits // 32) * outputs + 2 * many * outputs + zeros + 4 * inputs

    return bytes_of


def _awq(about: Mapping[str, Any]) -> Callable[[int, int], int]:
    """Return the size for bits packed along the outputs in 32-bit words, and scales (2 bytes) and zeros per group."""
    bits, groups = _number(about, "bits", 4), _groups(about, 128)

    def bytes_of(inputs: int, outputs: int) -> int:
        many, words = groups(inputs), 4 * -(-outputs * bits // 32)
        return inputs * words + many * words + 2 * many * outputs

    return bytes_of


def _bitsandbytes(about: Mapping[str, Any]) -> Callable[[int, int], int]:
    """Return the size for 8 bits with a float32 per row, or 4 bits with a scale per 64 (if set, in 8 bits)."""
    if about.get("load_in_8bit"):
        return lambda inputs, outputs: inputs * outputs + 4 * outputs
    double = bool(about.get("bnb_4bit_use_double_quant"))

    def bytes_of(inputs: int, outputs: int) -> int:
        blocks = -(-inputs * outputs // 64)
        table = 4 * 16
        scales = blocks + 4 * -(-blocks // 256) + 4 * 256 if double else 4 * blocks
        return -(-inputs * outputs // 2) + scales + table

    return bytes_of


def _compressed(about: Mapping[str, Any]) -> Callable[[int, int], int]:
    """Return the size for the first group's weights: their bits and a 2-byte scale per group, row or matrix."""
    config = about.get("config_groups")
    first = next(iter(config.values()), None) if isinstance(config, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ValueError("quantization_config: config_groups has no weights in its first group")
    bits, strategy = _number(weights, "num_bits", 8), weights.get("strategy", "tensor")
    if strategy not in ("group", "channel", "tensor"):
        raise ValueError(f"quantization_config: strategy is group, channel or tensor; got {short(strategy)}")
    groups = _groups(weights, 128)

    def bytes_of(inputs: int, outputs: int) -> int:
        scales = {"group": outputs * groups(inputs), "channel": outputs, "tensor": 1}[strategy]
        packed = 4 * -(-inputs * bits // 32) * outputs + 16 if bits < 8 else inputs * outputs
        return packed + 2 * scales

    return bytes_of


_METHODS: dict[str, Callable[[Mapping[str, Any]], Callable[[int, int], int]]] = {
    "fp8": _fp8,
    # half a byte per weight, and one byte per 32 weights of a row
    "mxfp4": lambda about: lambda inputs, outputs: outputs * -(-inputs // 32) * 17,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
}

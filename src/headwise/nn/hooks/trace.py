"""The stages of multi-head attention with names, formulas, shapes and numbers, for learning and debugging."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...ops.masks.constructors import causal as causal_mask
from ...ops.masks.mask import Mask
from ...ops.statistics.weights import weighted_values, weights
from ...plan import AttentionShape, parameter_count
from ...plan.shape import BiasOption
from ...shapes import check_gate
from ...shapes.arguments import check_counts, check_flags
from ..checks import check_input
from ..gated import GatedMultiHeadAttention
from ..head_views import join_heads, split_heads
from ..inner_attention import options_of
from ..multihead import MultiHeadAttention
from ..rotary import Positions
from ..torch_multihead import from_torch
from .head_mixing import Mixing, measure_mixing
from .projections import description, is_unmodified, plain_weight

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table

# Up to this size (weights plus largest activation) trace_shape computes numbers; above it, only shapes.
MAX_NUMBERS = 1 << 26
MOST_NUMBERS = 10**15  # more than fits into memory; torch stores the bytes of a tensor in 63 bits


@dataclass(frozen=True, eq=False)
class Stage:
    """One step of a `Trace`.

    Attributes:
        name: The key in a `Trace`, such as ``"scores"``.
        formula: The formula as text.
        tensor: The result.
        note: A short remark.
    """

    name: str
    formula: str
    tensor: Tensor
    note: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each axis."""
        return tuple(self.tensor.shape)

    def __repr__(self) -> str:
        return f"Stage({self.name!r}, {self.formula!r}, shape={list(self.shape)})"


@dataclass(frozen=True, eq=False)
class Trace:
    """The stages in order, the parameter counts, and the effect of W_O. Prints as a table.

    Attributes:
        stages: The stages from the input to the output.
        parameters: Number of parameters of each part of the module, by its name in the state dict.
        mixing: The contribution of each head to the output; None if only shapes were computed, or if o_proj is not a
            plain linear layer.
    """

    stages: tuple[Stage, ...]
    parameters: dict[str, int]
    mixing: Mixing | None = None

    @property
    def parameter_count(self) -> int:
        """The total number of parameters: 4 d_model^2 for plain multi-head attention without biases."""
        return sum(self.parameters.values())

    def __getitem__(self, name: str) -> Stage:
        """Return the stage of that name, or raise a KeyError with the names of all stages."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(f"no stage {name!r}; there are {', '.join(stage.name for stage in self.stages)}")

    def to_dict(self) -> dict[str, Any]:
        """Return shapes and numbers for JSON, without tensors."""
        return {
            "stages": [
                {"name": s.name, "formula": s.formula, "shape": list(s.shape), "note": s.note} for s in self.stages
            ],
            "parameters": dict(self.parameters),
            "parameter_count": self.parameter_count,
            "mixing": None if self.mixing is None else self.mixing.to_dict(),
        }

    def table(self) -> Table:
        """Return the stages as a rich table."""
        from rich.table import Table
        from rich.text import Text

        table = Table("stage", "formula", "shape", "note", title="Multi-head attention, stage by stage")
        for stage in self.stages:
            table.add_row(*(Text(cell) for cell in (stage.name, stage.formula, str(list(stage.shape)), stage.note)))
        return table

    def summary(self) -> str:
        """Return the parameters and the effect of W_O as text."""
        counts = " + ".join(f"{name} {count:,}" for name, count in self.parameters.items())
        parameters = f"parameters: {self.parameter_count:,} = {counts}{self._as_squares()}"
        if self.mixing is None:
            return f"{parameters}\nwhat W_O changes: not measured, {self._why_unmixed()}"
        return f"{parameters}\n{self.mixing}"

    def _why_unmixed(self) -> str:
        if self.stages[-1].tensor.is_meta:
            return "for sizes this large are traced without numbers"
        return "for the input is empty, or o_proj is no plain linear layer"

    def _as_squares(self) -> str:
        d_model = self.stages[-1].shape[-1]
        times, rest = divmod(self.parameter_count, d_model * d_model)
        return f" = {times} d_model^2" if times and not rest else ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        yield self.table()
        yield Text(self.summary())

    def __str__(self) -> str:
        from ...plan.show.printed import plain

        return plain(self)


def trace(
    mha: MultiHeadAttention | nn.MultiheadAttention,
    x: Tensor,
    memory: Tensor | tuple[Tensor, Tensor] | None = None,
    *,
    mask: Mask | Tensor | None = None,
    positions: Positions = None,
) -> Trace:
    """Run `mha` step by step and store every stage; the last stage is the output of ``mha(x, memory, ...)``.

    Scores and weights are full (B, H, T, S) tensors, so use small inputs. With gradients enabled, the gradient of the
    heads flows through the stage "weights", where ``retain_grad`` makes it available. If the inner part is a plain
    function, its scores and weights are unknown, and the table has a note about it.

    A `torch.nn.MultiheadAttention`, also one replaced by `headwise.nn.replace`, is converted first
    (`headwise.nn.from_torch`), so its projections have headwise's names. The other arguments are those of a call of
    `headwise.MultiHeadAttention`.

    Raises:
        TypeError: `mha` is not a `headwise.MultiHeadAttention` or `torch.nn.MultiheadAttention`, or is quantised.
        ValueError: as for a call of the module, or for `headwise.nn.from_torch`.

    Example:
        >>> mha = MultiHeadAttention(12, 3)
        >>> result = trace(mha, torch.randn(2, 5, 12))
        >>> [(stage.name, stage.shape) for stage in result.stages[-4:]]
        [('weights', (2, 3, 5, 5)), ('heads', (2, 3, 5, 4)), ('concatenation', (2, 5, 12)), ('output', (2, 5, 12))]
    """
    if isinstance(mha, nn.MultiheadAttention):
        mha = from_torch(mha)
    if not isinstance(mha, MultiHeadAttention):
        raise TypeError(f"trace takes a headwise.MultiHeadAttention; got {type(mha).__name__}")
    parameters = _parameters(mha)
    check_input(x, mha.d_model, mha.q_proj)
    for_keys, for_values = mha._sources(x, memory)
    stages = _inputs(x, memory, for_keys, for_values)
    split = {}
    for letter, projection, source, heads, size in (
        ("q", mha.q_proj, x, mha.num_heads, mha.head_dim),
        ("k", mha.k_proj, for_keys, mha.num_kv_heads, mha.head_dim),
        ("v", mha.v_proj, for_values, mha.num_kv_heads, mha.value_dim),
    ):
        fused = projection(source)
        split[letter] = split_heads(fused, heads, size)
        name = "X" if source is x else "N" if source is not for_keys else "M"
        stages += _projected(letter, _product(f"{letter}_proj", projection, name), fused, split[letter])
    query, key, value = split["q"], split["k"], split["v"]
    if mha.q_norm is not None:
        query, key = mha._normalize(query, key)
        stages += [Stage("q_norm", "norm(Q)", query, "each head vector"), Stage("k_norm", "norm(K)", key)]
    query, key = mha._rotate(query, key, positions)
    if mha.rotary is not None:
        stages += [
            Stage("q_rotary", "R_i q_i", query, "turned by its position"),
            Stage("k_rotary", "R_j k_j", key, "scores now know j - i"),
        ]
    options = options_of(mha.inner)
    if options is not None:
        stages += _scores(options, query, key, mask)
    heads_BHTV = _heads(mha.inner, options, stages[-1], query, key, value, mask)
    alone = "each head on its own"
    unknown = f"the inner part {type(mha.inner).__name__} does not show its scores and weights"
    stages.append(Stage("heads", "head_i = P_i V_i", heads_BHTV, unknown if options is None else alone))
    if isinstance(mha, GatedMultiHeadAttention):
        stages += _gated(mha.gate(x), heads_BHTV)
        heads_BHTV = stages[-1].tensor
    joined = join_heads(heads_BHTV)
    V = mha.value_dim
    stages.append(
        Stage("concatenation", "Concat(head_1 .. head_h)", joined, f"columns {V} i .. {V} i + {V - 1}: head i")
    )
    mixed = _product("o_proj", mha.o_proj, "Concat(head_1 .. head_h)")
    stages.append(Stage("output", mixed, mha.o_proj(joined), "W_O mixes the heads"))
    mixing = None if joined.is_meta or not joined.numel() else measure_mixing(mha, joined)
    return Trace(tuple(stages), parameters, mixing)


def _inputs(
    x: Tensor, memory: Tensor | tuple[Tensor, Tensor] | None, for_keys: Tensor, for_values: Tensor
) -> list[Stage]:
    """Return the stages of the inputs: x, and the memory if one is given."""
    stages = [Stage("x", "X", x, "batch, tokens, d_model")]
    if for_values is not for_keys:
        stages.append(Stage("memory_keys", "M", for_keys, "keys come from here"))
        stages.append(Stage("memory_values", "N", for_values, "values come from here"))
    elif memory is not None:
        stages.append(Stage("memory", "M", for_keys, "keys and values come from here"))
    return stages


def trace_shape(
    d_model: int,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    bias: BiasOption = False,
    batch: int = 1,
    length: int = 16,
    causal: bool = False,
) -> Trace:
    """Trace a module of these sizes, with random weights, on a random input (batch, length, d_model).

    The same sizes always give the same numbers. For sizes that need more than about half a GB, only shapes and
    parameter counts are computed.

    Raises:
        TypeError, ValueError: as for `headwise.MultiHeadAttention`; or `batch` or `length` is not a positive int.

    Example:
        >>> result = trace_shape(512, 4, batch=4)
        >>> [stage.shape for stage in result.stages[:4]]
        [(4, 16, 512), (4, 16, 512), (4, 16, 4, 128), (4, 4, 16, 128)]
        >>> result.parameter_count == 4 * 512**2
        True
    """
    check_counts(1, batch=batch, length=length)
    check_flags(causal=causal)
    sizes: dict[str, Any] = {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "value_dim": value_dim, "bias": bias}
    shape = AttentionShape.of(d_model, num_heads, **sizes)
    widest = max(d_model, num_heads * max(shape.head_dim, shape.value_dim, length))
    numbers = parameter_count(d_model, num_heads, **sizes) + batch * length * widest
    if numbers > MOST_NUMBERS:
        raise ValueError(
            f"weights and activations have at most {MOST_NUMBERS:,} numbers together; d_model {d_model}, {num_heads} "
            f"heads of {shape.head_dim}, batch {batch} and length {length} make more: give smaller sizes"
        )
    device = "meta" if numbers > MAX_NUMBERS else "cpu"
    with torch.random.fork_rng(devices=[]), torch.device(device), torch.no_grad():
        torch.manual_seed(0)
        mha = MultiHeadAttention(d_model, num_heads, **sizes)
        return trace(mha, torch.randn(batch, length, d_model), mask=causal_mask() if causal else None)


def _projected(letter: str, product: str, fused: Tensor, split: Tensor) -> list[Stage]:
    """Return the stages of one projection: all heads in one matrix, split into heads, heads before tokens."""
    heads, size = split.shape[1], split.shape[-1]
    name = letter.upper()
    return [
        Stage(f"{letter}_proj", f"{name} = {product}", fused, "all heads in one matrix product"),
        Stage(
            f"{letter}_split", f"{heads} heads of {size}", split.transpose(1, 2), f"{heads} x {size} = {heads * size}"
        ),
        Stage(f"{letter}_heads", f"{name}_i", split, "heads before tokens"),
    ]


def _product(name: str, projection: nn.Module, source: str) -> str:
    """Return ``X W_Q + b_Q`` for q_proj; ``q_proj(X)`` if it is not a plain linear layer."""
    if plain_weight(projection) is None:
        return f"{name}({source})"
    letter = name[0].upper()
    return f"{source} W_{letter}" + ("" if projection.bias is None else f" + b_{letter}")


def _scores(inner: dict[str, Any], query: Tensor, key: Tensor, mask: Mask | Tensor | None) -> list[Stage]:
    """Return the stages of the scores in this call, and the weights."""
    scale, softcap, sinks = (inner.get(name) for name in ("scale", "softcap", "sinks"))
    H, K = query.shape[1], key.shape[1]
    shared = "" if H == K else f"query head i reads key head i // {H // K}"
    product = "Q_i K_i^T / sqrt(d_k)" if scale is None else f"{scale:g} Q_i K_i^T"
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "mask": mask}
    stages = [Stage("scores", f"S_i = {product}", weights(query, key, stage="raw", **options), shared or "query x key")]
    if softcap is not None:
        capped = weights(query, key, stage="softcapped", **options)
        stages.append(Stage("softcapped", f"{softcap:g} tanh(S_i / {softcap:g})", capped, f"within +-{softcap:g}"))
    if mask is not None:
        masked = weights(query, key, stage="biased", **options)
        stages.append(Stage("masked", "S_i + mask", masked, "-inf: may not be attended"))
    sums = "rows sum to 1" if sinks is None else "rows sum to less than 1: the sink takes the rest"
    stages.append(Stage("weights", "P_i = softmax(S_i)", weights(query, key, **options), sums))
    return stages


def _heads(
    inner: nn.Module,
    options: dict[str, Any] | None,
    last: Stage,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None,
) -> Tensor:
    """Compute the heads (B, H, T, V) with the inner part, with their gradient through the weights in `last`.

    If the inner part has hooks, which may change its output, the weights get no gradient.
    """
    weighted = options is not None and last.tensor.requires_grad and is_unmodified(inner)
    if weighted and options is not None and options.get("dropout"):  # the inner part would draw another dropout mask
        return weighted_values(nn.functional.dropout(last.tensor, options["dropout"]), value, mask).to(query.dtype)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not weighted):
        heads: Tensor = inner(query, key, value, mask=mask)
    return _WithGradientOf.apply(weighted_values(last.tensor, value, mask), heads) if weighted else heads


def _gated(gate: Tensor, heads_BHTV: Tensor) -> list[Stage]:
    """Return the stages of an output gate: the gate, and the heads times the gate."""
    gated = heads_BHTV * check_gate(gate, heads_BHTV.shape, heads_BHTV.device).to(heads_BHTV.dtype)
    return [
        Stage("gate", "G_i = gate(X)", gate, "computed from the input"),
        Stage("gated_heads", "G_i * head_i", gated, "multiplied number by number"),
    ]


class _WithGradientOf(torch.autograd.Function):
    """An identity that returns `result` and passes the gradient to `of`; the two differ only by rounding."""

    @staticmethod
    def forward(ctx: Any, of: Tensor, result: Tensor) -> Tensor:
        ctx.dtype = of.dtype
        return result.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


def _parameters(mha: MultiHeadAttention) -> dict[str, int]:
    """Count the parameters of each part; parts without parameters are omitted.

    Raises:
        TypeError: a projection has no parameters, as in quantised layers.
    """
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in mha.named_children()}
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        if not counts[name]:
            raise TypeError(
                f"trace counts the parameters of each projection, and {name} ({description(getattr(mha, name))}) has "
                "none; trace the module before it is quantised"
            )
    return {name: count for name, count in counts.items() if count}

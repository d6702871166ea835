"""Backend `flex`: torch's FlexAttention. Masks and biases become functions of indices; empty tiles are skipped.

It is compiled on CUDA. On the CPU it runs uncompiled and builds the whole T x S matrix; it is never chosen there and
runs only if requested by name, for tests.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import cache, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils import _pytree as pytree

from ..call import Call, Limit
from ..masks.algebra import AllOf, AnyOf, Not
from ..masks.indexing import saturated
from ..masks.mask import FULL, MIXED, Mask
from ..masks.positional_rules import Alibi, Blocks, Dilated, Function, Relative
from ..masks.reads import kept_for_rules
from ..masks.rule import Rule
from ..masks.rules import Band, Bias, Keep, Lengths, Segments

TILE = 128
MIN_HEAD_DIM = 16
# FlexAttention multiplies scores by log2(e). The lowest float32 number, a common mask value, would become -inf, and a
# row of only such biases would be treated as empty.
LOWEST = torch.finfo(torch.float32).min / 2


class RecompileLimit(Exception):
    """torch.compile does not compile FlexAttention for one more kind of call; from then on `LIMITS` refuses the call.

    Without `fullgraph=True` it would then run uncompiled, and build the T x S matrix.
    """


class _CompiledCalls:
    """The kinds of calls that torch.compile has compiled, and whether it compiles no more."""

    def __init__(self) -> None:
        self.kinds: set[Hashable] = set()
        self.limit: int | None = None  # torch's limit when it was met

    def are_full_for(self, call: Call) -> bool:
        """Return True if the limit was met, was not raised since then, and this kind of call is not compiled."""
        if self.limit is None or torch.compiler.is_compiling():  # a graph around the call has a limit of its own
            return False
        return self.limit >= _recompile_limit() and _kind_of(call) not in self.kinds

    def reason(self) -> str:
        """Return why a call is refused, and the way out."""
        return (
            f"torch.compile compiles FlexAttention for at most {self.limit} shapes and masks in a process, and they "
            "are used up; a higher torch._dynamo.config.recompile_limit allows more"
        )

    def run(self, call: Call, *args: Any, **options: Any) -> Any:
        """Run compiled FlexAttention; raise RecompileLimit where it would run uncompiled."""
        if torch.compiler.is_compiling():
            return _compiled()(*args, **options)
        try:
            result = _compiled()(*args, **options)
        except Exception as error:
            if type(error).__name__ != "FailOnRecompileLimitHit":  # importing its module takes a second
                raise
            self.kinds.discard(_kind_of(call))
            self.limit = _recompile_limit()
            raise RecompileLimit(self.reason()) from error
        self.kinds.add(_kind_of(call))
        return result


_compiled_calls = _CompiledCalls()


LIMITS = (
    Limit(lambda c: c.is_empty, "FlexAttention takes no empty tensors"),
    Limit(lambda c: c.query.dtype == torch.float64, "FlexAttention has no float64"),
    Limit(lambda c: c.options.dropout > 0, "FlexAttention has no dropout"),
    Limit(lambda c: c.bias_needs_grad, "FlexAttention gives no gradient to a bias here"),
    Limit(lambda c: c.is_transformed, "FlexAttention has no torch.func rules (vmap, jvp)"),
    Limit(
        lambda c: c.device_type == "cpu" and torch.compiler.is_compiling(),
        "FlexAttention compiled on a CPU returns no log-sum-exp, which headwise needs to find rows without keys",
    ),
    Limit(lambda c: c.device_type == "cpu" and c.needs_grad, "FlexAttention has no backward on CPU"),
    Limit(
        lambda c: without_form(c.options.mask.parts) is not None,
        lambda c: f"FlexAttention has no form here for {without_form(c.options.mask.parts)}",
    ),
    Limit(
        lambda c: c.device_type != "cpu" and min(c.query.shape[-1], c.value.shape[-1]) < MIN_HEAD_DIM,
        f"FlexAttention's fused kernel needs head dims of at least {MIN_HEAD_DIM}",
    ),
    Limit(lambda c: _compiled_calls.are_full_for(c), lambda c: _compiled_calls.reason()),
)


def _recompile_limit() -> int:
    import torch._dynamo.config

    return torch._dynamo.config.recompile_limit


def _kind_of(call: Call) -> Hashable:
    """Return what decides about the compiled code, all but: shapes, dtypes, numbers; no data of tensors."""
    tensors, rest = pytree.tree_flatten(call.options.mask)
    _, scale, softcap, *_ = call.options
    shapes = tuple((x.shape, x.dtype, x.device) for x in (call.query, call.key, call.value, *tensors))
    return shapes, rest, scale, softcap, call.needs_grad


def is_worthwhile(call: Call) -> bool:
    """Return True on CUDA if FlexAttention skips tiles that SDPA would compute, or supports what SDPA does not."""
    if not is_large_enough(call):
        return False
    mask, options = call.options.mask, call.options
    square = not mask.parts or mask.is_top_left
    return not square or options.softcap is not None or options.sinks is not None or call.return_lse


def is_large_enough(call: Call) -> bool:
    """Return True on CUDA if there is a whole tile of queries and keys."""
    _, _, _, T, S = call.sizes
    return call.device_type == "cuda" and T >= TILE and S >= TILE


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return out (B, H, T, V) and the lse (B, H, T) if it is requested."""
    (_, H, K, T, S), options = call.sizes, call.options
    attend = _uncompiled if call.device_type == "cpu" else _compiled_calls.run
    out, aux = attend(
        call,
        call.query,
        call.key,
        call.value,
        score_mod=_score_mod(options.mask, options.softcap, T, S),
        block_mask=_block_mask(options.mask, T, S, call.query.device),
        scale=options.scale,
        enable_gqa=H != K,
        return_aux=AuxRequest(lse=True),
    )
    lse_BHT = aux.lse
    empty_BHT = lse_BHT == -torch.inf
    if options.sinks is not None:  # the denominator has one more term, so out is multiplied by sigmoid(lse - sink)
        sinks = options.sinks.to(lse_BHT.dtype).view(1, H, 1)
        sinks = sinks.masked_fill(sinks == torch.inf, torch.nan)  # Inf / Inf gives NaN
        lse_BHT = lse_BHT.masked_fill(empty_BHT, 0.0)  # finite, so that its gradient is not NaN
        out = (out * torch.sigmoid(lse_BHT - sinks)[..., None]).to(out.dtype)
        lse_BHT = torch.logaddexp(lse_BHT, sinks).masked_fill(empty_BHT, -torch.inf)
    return out.masked_fill(empty_BHT[..., None], 0.0), lse_BHT if call.return_lse else None


def _uncompiled(call: Call, *args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():  # torch warns that it is slow uncompiled; it is never chosen here
        warnings.simplefilter("ignore", UserWarning)
        return flex_attention(*args, **options)


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _block_mask(mask: Mask, T: int, S: int, device: torch.device) -> BlockMask | None:
    """Return FlexAttention's lists of mixed and full tiles for our mask, without a T x S tensor."""
    rules = tuple(part for part in mask.parts if part.restricts)
    return kept_for_rules(rules, T, S, device, _make_block_mask) if rules else None


def _make_block_mask(rules: tuple[Rule, ...], T: int, S: int, device: torch.device) -> BlockMask:
    tiles = Mask(rules).tiles(T, S, tile_q=TILE, tile_k=TILE, device=device)

    def listed(kind: int) -> tuple[Tensor, Tensor]:
        hit = tiles == kind
        order = torch.argsort(hit.int(), dim=-1, descending=True, stable=True)
        return hit.sum(-1, dtype=torch.int32), order.to(torch.int32)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = [_value(part, b, h, i, j, T, S) for part in rules]
        pairs = zip(rules, seen, strict=True)
        return reduce(torch.logical_and, [x != -torch.inf if part.biases else x for part, x in pairs])

    return BlockMask.from_kv_blocks(
        *listed(MIXED), *listed(FULL), BLOCK_SIZE=(TILE, TILE), mask_mod=mask_mod, seq_lengths=(T, S)
    )


def _score_mod(mask: Mask, softcap: float | None, T: int, S: int) -> Callable[..., Tensor] | None:
    rules = [part for part in mask.parts if part.biases]
    if not rules and softcap is None:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        score = reduce(torch.add, [_value(part, b, h, i, j, T, S) for part in rules], score)
        return torch.clamp(score, min=LOWEST)

    return score_mod


def _value(rule: Rule, b: Tensor, h: Tensor, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
    """Return a rule's value for one pair, in the scalar form that FlexAttention traces: the same as `rule.at`."""
    return FORMS[type(rule)](rule, _Place(b, h, i, j, T, S))


class _Place(NamedTuple):
    """One pair of query and key, as FlexAttention passes it."""

    b: Tensor
    h: Tensor
    i: Tensor
    j: Tensor
    T: int
    S: int

    def row(self, ends: int | Tensor) -> int | Tensor:
        """Return the entry of a (B|1,) tensor for this batch row."""
        return ends[self.b if ends.shape[0] > 1 else 0] if isinstance(ends, Tensor) else ends

    def pos(self, offset: int | Tensor | None) -> Tensor:
        """Return the position of the query among the keys."""
        return self.i + (self.S - self.T if offset is None else self.row(saturated(offset)))

    def id(self, ids: Tensor, index: Tensor) -> Tensor:
        """Return the entry of an (n,) or (B|1, n) tensor for an index."""
        return ids[index] if ids.ndim == 1 else ids[self.b if ids.shape[0] > 1 else 0, index]


def _band(rule: Band, at: _Place) -> Tensor:
    pos = at.pos(rule.offset)
    seen = (at.j == at.j) if rule.right is None else at.j <= pos + rule.right
    return seen if rule.left is None else seen & ((at.j > pos - rule.left) | (at.j < rule.first))


def _lengths(rule: Lengths, at: _Place) -> Tensor:
    seen = at.j < at.row(rule.stop)
    return seen if rule.start is None else seen & (at.j >= at.row(rule.start))


def _dense(rule: Keep | Bias, at: _Place) -> Tensor:
    places = (at.b, at.h, at.i, at.j)
    return rule.full[tuple(x if size > 1 else 0 for x, size in zip(places, rule.full.shape, strict=True))]


def _alibi(rule: Alibi, at: _Place) -> Tensor:
    slopes = rule.slopes.view(-1, rule.slopes.shape[-1])
    return -slopes[at.b if slopes.shape[0] > 1 else 0, at.h] * (at.pos(rule.offset) - at.j).abs()


def _relative(rule: Relative, at: _Place) -> Tensor:
    R = rule.radius
    return rule.table[at.h, (at.j - at.pos(rule.offset)).clamp(-R, R) + R]


def _blocks(rule: Blocks, at: _Place) -> Tensor:
    mine, its = (torch.div(x, rule.size, rounding_mode="floor") for x in (at.pos(rule.offset), at.j))
    return mine == its


def _joined(join: Callable[[Any, Any], Any]) -> Callable[[Any, _Place], Tensor]:
    return lambda rule, at: reduce(join, [_value(inner, *at) for inner in rule.rules])


FORMS: dict[type[Rule], Callable[[Any, _Place], Tensor]] = {
    Band: _band,
    Lengths: _lengths,
    Segments: lambda rule, at: at.id(rule.query_ids, at.i) == at.id(rule.key_ids, at.j),
    Keep: _dense,
    Bias: _dense,
    Alibi: _alibi,
    Relative: _relative,
    Dilated: lambda rule, at: (at.pos(rule.offset) - at.j) % rule.step == 0,
    Blocks: _blocks,
    Function: lambda rule, at: rule.function(at.b, at.h, at.i, at.j),
    AllOf: _joined(torch.logical_and),
    AnyOf: _joined(torch.logical_or),
    Not: lambda rule, at: ~_value(rule.rules[0], *at),
}


def without_form(rules: Sequence[Rule]) -> str | None:
    """Return the name of the first rule type, inner rules included, that FORMS does not have."""
    for rule in rules:
        if type(rule) not in FORMS:
            return type(rule).__name__
        inner = without_form(getattr(rule, "rules", ()))
        if inner is not None:
            return inner
    return None

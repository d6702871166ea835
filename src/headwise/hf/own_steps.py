"""A decode step in one call for models whose attention is code of their own (`architectures.SEAMS`).

Their code runs as `Seam` reads it, an operation of torch after another. For one token a row that costs more than all
that is computed. Where the statements from rotation or cache to what attention gives are known, a step runs the
class's code without `Seam`, and has these in one call of the native kernel. The numbers are those of `Seam`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import product
from types import FunctionType, MappingProxyType
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor, nn

from ..nn.projections import is_itself
from ..ops.masks.compose import EVERYTHING, Mask
from ..ops.masks.make import bias, keep
from ..ops.native.step import Scores, runs_plain
from .architectures import CACHE
from .attention import without_lowest
from .decoding import Rotation, mask_of_step, nobody_takes_part, turned_step, warn_of_no_steps
from .masks import Hidden
from .running import weights_are_wanted
from .syntax import compiled, fingerprint, fingerprint_of, parted, syntax_of, without_renaming

CACHES = "layer_past", CACHE
"""What modules call their cache."""


class NoStepError(Exception):
    """A call that is not a step, found before anything has changed."""


class OwnCode(NamedTuple):
    """What stands in the place of statements of a `forward`.

    Attributes:
        of: the class.
        instead: statements; `_headwise_step(cache, layer, self, query, key, value, mask, ...)` is `_step`.
        calls: the methods of the class, and functions of its file, that say what the old ones did, each with the
            fingerprint of its code.
        rotation: what queries and keys turn by.
    """

    of: str
    instead: str
    calls: Mapping[str, str] = MappingProxyType({})
    rotation: Rotation = Rotation()


_IN_PARTS = """
attn_output = _headwise_step(
    layer_past, self.layer_idx, self, query.permute(0, 2, 1, 3), key.permute(0, 2, 1, 3), value, attention_mask,
    scale=1 / self.scale_attn, angles=(cos, sin), size=self.rotary_dim,
)
attn_weights = None
"""
_PAIRS = Rotation(interleaved=True, angles="pair", back=True)


def _mpt(cache: str) -> OwnCode:
    instead = f"""
attn_weights = None
context_states = _headwise_step(
    {cache}, self.layer_idx, self, query_states, key_states, value_states, attention_mask,
    scale=self.softmax_scale, added=position_bias,
)
"""
    return OwnCode("MptAttention", instead)


def _xglm(cache: str) -> OwnCode:
    instead = f"""
attn_weights_reshaped = None
attn_output = _headwise_step(
    None if is_cross_attention else {cache}, self.layer_idx, self,
    query_states.view(bsz, tgt_len, self.num_heads, self.head_dim).transpose(1, 2), key_states, value_states,
    attention_mask, scale=1.0,
)
"""
    return OwnCode("XGLMAttention", instead)


OWN_CODE: dict[tuple[int, str], OwnCode] = {
    # GPT-J reads its table of angles for all places, copied for each row; here for one place.
    (9, "4cb6b9c109c4c7c5"): OwnCode(
        "GPTJAttention",
        "sin, cos = self.embed_positions[position_ids].to(key.dtype).chunk(2, dim=-1)" + _IN_PARTS,
        {
            "_attn": "09ba172dbdf48da6",
            "_get_embed_positions": "fdb3e7c5d97431f6",
            "apply_rotary_pos_emb": "14d3196e3f937b8e",
            "rotate_every_two": "8f3e81a7bacb322a",
        },
        _PAIRS,
    ),
    (5, "51ffa74d0983752c"): OwnCode(
        "CodeGenAttention",
        _IN_PARTS,
        {
            "_attn": "6e5252c88c9be568",
            "apply_rotary_pos_emb": "14d3196e3f937b8e",
            "rotate_every_two": "8f3e81a7bacb322a",
        },
        _PAIRS,
    ),
    (2, "feaa53f6ed2cee81"): OwnCode(
        "GPTNeoSelfAttention",
        """
attn_output = _headwise_step(
    layer_past, self.layer_id, self, query, key, value, attention_mask,
    scale=1.0, kept=self.bias,
)
attn_weights = None
""",
        {"_attn": "c8032c8f73c063a5"},
    ),
    (11, "c1f3ae892e0d5fab"): OwnCode(
        "BloomAttention",
        """
attention_probs = None
context_layer = _headwise_step(
    layer_past, self.layer_idx, self, query_layer, key_layer, value_layer, attention_mask,
    scale=self.inv_norm_factor, added=alibi, beta=self.beta,
).flatten(0, 1)
""",
    ),
    # What ALiBi adds is in Falcon's mask.
    (4, "5473da7080e130b4"): OwnCode(
        "FalconAttention",
        """
attn_output = _headwise_step(
    layer_past, self.layer_idx, self, query_layer, key_layer, value_layer, attention_mask,
    scale=self.inv_norm_factor, angles=(*position_embeddings,) if alibi is None else None,
)
attn_output = attn_output.transpose(1, 2).reshape(batch_size, query_length, self.num_heads * self.head_dim)
return self.dense(attn_output), None
""",
        {"apply_rotary_pos_emb": "6624cf83ff11cb45", "rotate_half": "3f33ea54d4fc5890"},
    ),
    (8, "fd3846e5091aa95e"): _mpt("past_key_values"),
    (18, "5f72c553578c6f7e"): _xglm("curr_past_key_values"),
    # Since transformers 5.24:
    (8, "e9d487116f93de38"): _mpt("cache"),
    (18, "ea31fc95d698e776"): _xglm("curr_cache"),
}
"""The number of statements and their fingerprint -> what stands in their place in a step."""


def stepped(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call of a module gives where it is a step; None where its own code has to run."""
    x = args[0] if args else kwargs.get("hidden_states")
    if type(x) is not Tensor or x.ndim != 3 or x.shape[1] != 1 or not runs_plain():
        return None
    if not any(hasattr(kwargs.get(name), "stepped") for name in CACHES) or kwargs.get("output_attentions"):
        return None
    forward = stepping(type(module))
    if forward is None or weights_are_wanted() or not is_itself(module):
        return None
    try:
        return forward(module, *args, **kwargs)
    except NoStepError:
        return None


def stepping(owner: type[nn.Module]) -> Callable[..., Any] | None:
    """A `forward` of steps alone for a class; None where its code, or the code that it calls, is not known."""
    ours, calls = _stepping(owner, owner.forward)  # type: ignore[arg-type]  # mypy has it that modules have no hash
    if ours is None:
        return None
    names = ours.__globals__
    return ours if all(_called(owner, names, name) is function for name, function in calls) else None


def _called(owner: type[nn.Module], names: dict[str, Any], name: str) -> Any:
    return getattr(owner, name, None) or names.get(name)


@lru_cache(maxsize=256)
def _stepping(owner: type[nn.Module], forward: Any) -> tuple[Any, tuple[tuple[str, Any], ...]]:
    """A `forward` of steps, and the functions of whose code that is true, by their names."""
    forward, _ = without_renaming(forward)
    if type(forward) is not FunctionType or hasattr(forward, "__wrapped__") or forward.__closure__:
        return None, ()
    missing = "its statements are not those that headwise knows"
    try:
        function = syntax_of(forward)
        body = function.body = [part for statement in function.body for part in parted(statement)]
        for first, count in product(range(len(body)), sorted({n for n, _ in OWN_CODE})):
            known = OWN_CODE.get((count, fingerprint_of(body[first : first + count])))
            if known is None:
                continue
            calls = _calls_of(owner, forward.__globals__, known)
            if calls is None:
                missing = f"one of {', '.join(known.calls)} is not as headwise knows it"
                break
            function.body[first : first + count] = _at(body[first], ast.parse(known.instead).body)
            return compiled(function, forward, partial(_step, known.rotation)), calls
    except (OSError, TypeError, SyntaxError):
        missing = "its code cannot be read"
    if owner.__name__ in {known.of for known in OWN_CODE.values()}:
        warn_of_no_steps(owner.__name__, missing)
    return None, ()


def _calls_of(owner: type[nn.Module], names: dict[str, Any], known: OwnCode) -> tuple[tuple[str, Any], ...] | None:
    """The functions that the replaced statements call, by their names; None where one has other code."""
    calls = tuple((name, _called(owner, names, name)) for name in known.calls)
    same = all(
        type(function) is FunctionType and fingerprint(function) == known.calls[name] for name, function in calls
    )
    return calls if same else None


def _at(place: ast.stmt, statements: list[ast.stmt]) -> list[ast.stmt]:
    """Statements with the line of another."""
    for statement in statements:
        for node in ast.walk(statement):
            ast.copy_location(node, place)
    return statements


def _step(
    turning: Rotation,
    cache: Any,
    layer_idx: Any,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    /,
    scale: float,
    angles: tuple[Any, Any] | None = None,
    size: int | None = None,
    added: Tensor | None = None,
    beta: float = 1.0,
    kept: Tensor | None = None,
) -> Tensor:
    """The heads (B, H, 1, V) of one token a row.

    `added`: (H or B * H, 1, S or more), of which the last S are added `beta` times to the scores. `kept`: what may be
    attended, (1, 1, N, N) for all places.
    """
    layer = cache.stepped(layer_idx) if hasattr(cache, "stepped") else None
    if layer is None or not nobody_takes_part(module, query, key) or query.ndim != 4:
        raise NoStepError
    S = layer.columns[0] + 1
    rules = mask.mask if type(mask) is Hidden and _is_of(mask, S) else mask_of_step(mask, S)
    if rules is None:
        raise NoStepError
    if kept is not None:
        rules = keep(kept[:, :, S - 1 : S, :S]) & rules
    if added is not None:
        rules = rules & _bias_of(added, beta, query.shape[1], S)
    out = turned_step(layer, query, key, value, turning, angles, size, rules, Scores(scale))
    if out is None:
        raise NoStepError
    return out


def _is_of(hidden: Hidden, S: int) -> bool:
    return hidden.shape[2:] == (1, S) and not hidden.exposed


_last: tuple[Any, Any, Mask] = (lambda: None, None, EVERYTHING)
"""The bias that was asked for last, for layers one after another have the same one: it, how it was read, its mask."""


def _bias_of(x: Tensor, beta: float, heads: int, S: int) -> Mask:
    global _last
    how = (None if x.is_inference() else x._version, beta, heads, S)
    last = _last  # which another thread may put another in the place of
    if last[0]() is not x or last[1] != how or x.is_inference():  # of which nobody counts the writes
        of_keys = (x if beta == 1 else x * beta)[..., -S:]
        if of_keys.shape[-1] != S:
            raise NoStepError
        _last = last = ref(x), how, bias(without_lowest(of_keys.reshape(-1, heads, 1, S)))
    return last[2]

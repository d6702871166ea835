"""A decode step of a transformers layer in one call, where the code of its attention is known.

transformers calls attention functions after rotation and cache; each is some operations of torch, and some calls of
Python, more than the attention of one token. `make_cache` therefore prepares the classes of attention whose `forward`
rotates, caches and attends in statements that read like those of `syntax`: with a cache of ours and one token a row,
one function of the native kernel stands for them. Projections, norms, gates and all else are the class's own code, and
so is every other call. The numbers are the same, bit by bit.
"""

from __future__ import annotations

import inspect
import warnings
from functools import lru_cache, partial, wraps
from types import FunctionType
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from ..nn.sharded import current
from ..ops.masks.compose import EVERYTHING, Mask
from ..ops.masks.make import bias
from ..ops.native.step import Scores, Turn, runs_plain
from .architectures import CROSS_ATTENTION, UNSTEPPED
from .attention import HARMLESS, attentions_are_collected, headwise_attention
from .masks import StructuralMask
from .sessions import watched
from .syntax import core_of, fingerprint, syntax_of, unlike, with_steps, without_renaming
from .tensor import heads_here
from .whole import whole_batch


class Rotation(NamedTuple):
    """What a function of transformers does to queries and keys, (q, k, cos, sin) -> (q, k).

    Attributes:
        partly: the angles say how much of a head turns; else they are for all of it.
        interleaved: pairs are neighbours; else n and n + half of what turns.
        angles: "each": one for each number that turns; "first": the same, of which the first half is read, one for each
            pair; "pair": one for each pair.
        wide: computed in float32 and rounded at the end; else so with angles in float32 alone, where `back` allows it.
        back: the result has the dtype that came in.
    """

    partly: bool = False
    interleaved: bool = False
    angles: str = "each"
    wide: bool = False
    back: bool = False


_HALF, _PAIRS, _PAIRS_TOO = "3f33ea54d4fc5890", "55a9e6fe73e0f9f2", "75f8d6179b6ab18a"

ROTATIONS: dict[str, Rotation] = {
    f"6624cf83ff11cb45 {_HALF}": Rotation(),  # Llama
    f"6624cf83ff11cb45 {_PAIRS_TOO}": Rotation(interleaved=True),  # BLT
    f"904b17fa28ba0560 {_HALF}": Rotation(partly=True),  # GPT-NeoX
    f"19f3825b1e614590 {_HALF}": Rotation(partly=True),  # Phi-3
    f"54441609d0c78029 {_HALF}": Rotation(partly=True),  # Nemotron
    f"c7e07601b69b089a {_HALF}": Rotation(partly=True),  # Qwen 4
    f"e2a71c7dc03e03cd {_HALF}": Rotation(back=True),  # OLMo
    f"e44eef2d3bb47a5d {_HALF}": Rotation(wide=True),  # ModernBERT
    f"b70d37fa6dae8b0c {_PAIRS}": Rotation(partly=True, interleaved=True, angles="first"),  # GLM
    f"8ebb5a3efde4556b {_PAIRS}": Rotation(partly=True, interleaved=True),  # GLM-4V
    f"65f89eedfe395261 {_PAIRS}": Rotation(interleaved=True, angles="first"),  # Helium
    f"daff905433650397 {_PAIRS}": Rotation(interleaved=True, angles="first", wide=True),  # Ernie 4.5
    f"bae3f3d6a5499262 {_PAIRS}": Rotation(interleaved=True, wide=True),  # Ernie 4.5 VL
    f"96216ea88aad73ee {_PAIRS_TOO}": Rotation(interleaved=True, wide=True),  # Cohere
    "934b2313c546966d cc8fc069beeccde0": Rotation(angles="pair"),  # gpt-oss
}
"""The functions that turn, each with the function of its file that it calls, by the fingerprints of their code."""


class Form(NamedTuple):
    """How a class takes its steps.

    Attributes:
        rotation: None where its own code turns.
        functions: those that turn.
        renamed: names of arguments that transformers' decorators around the `forward` give others.
    """

    rotation: Rotation | None
    functions: dict[str, FunctionType]
    renamed: frozenset[str]


def prepare(model: nn.Module) -> None:
    """Have the attention classes of a model whose code is known ask at each call whether it is a step of ours."""
    for module in model.modules():
        owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
        if "Attention" in owner.__name__:
            _prepare(owner)


@lru_cache(maxsize=4096)
def _prepare(owner: type[nn.Module]) -> None:
    theirs = vars(owner)["forward"]
    form, ours = stepping(theirs)
    if form is None or ours is None:
        return _report(owner, theirs)
    names, functions, renamed = ours.__globals__, form.functions, form.renamed

    @wraps(theirs)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        same = all(names.get(name) is function for name, function in functions.items())
        if runs_plain() and same and renamed.isdisjoint(kwargs):
            return ours(self, *args, **kwargs)
        return theirs(self, *args, **kwargs)

    owner.forward = forward


def _report(owner: type[nn.Module], theirs: Any) -> None:
    """Warn of a class that may have taken steps in another version of transformers, and takes none in this one."""
    name = owner.__name__
    if name in UNSTEPPED or CROSS_ATTENTION.search(name) or getattr(theirs, "__globals__", None) is globals():
        return
    inner, _ = without_renaming(theirs)
    try:
        missing = unlike(syntax_of(inspect.unwrap(inner)))
    except (OSError, TypeError, SyntaxError):  # no text to read
        return
    if missing:
        warn_of_no_steps(name, "its forward is decorated or replaced" if hasattr(inner, "__wrapped__") else missing)


def warn_of_no_steps(name: str, missing: str) -> None:
    """Tell that a class of attention decodes by its own code, as its code is not the one that headwise knows."""
    warnings.warn(
        f"{name} decodes a token by its own code and not in one call of the kernel, with the same result, but slower: "
        f"in transformers {transformers.__version__}, {missing}; other versions that headwise knows are "
        "`pip install 'headwise[hf]'`",
        stacklevel=2,
    )


def stepping(forward: Any) -> tuple[Form | None, FunctionType | None]:
    """How a `forward` takes steps, and one that does; None twice where its code is not known."""
    forward, renamed = without_renaming(forward)
    if type(forward) is not FunctionType or hasattr(forward, "__wrapped__") or forward.__closure__:
        return None, None
    try:
        core = core_of(syntax_of(forward))
        if core is None:
            return None, None
        rotation, functions = _rotation_of(core.rotate, forward.__globals__)
    except (OSError, TypeError, SyntaxError):  # no text to read
        return None, None
    step = partial(_step, rotation or Rotation())
    return Form(rotation, functions, renamed), with_steps(forward, core, rotation is not None, step)


def _rotation_of(name: str | None, names: dict[str, Any]) -> tuple[Rotation | None, dict[str, FunctionType]]:
    """What the function of that name does, and the functions that say so; None where it is not known."""
    function = names.get(name) if name is not None else None
    if name is None or not _is_plain_function(function):
        return None, {}
    called = [x for x in function.__code__.co_names if _is_plain_function(names.get(x))]
    functions = {x: names[x] for x in (name, *called)}
    rotation = ROTATIONS.get(" ".join(map(fingerprint, functions.values())))
    return (None, {}) if rotation is None else (rotation, functions)


def _is_plain_function(x: Any) -> TypeGuard[FunctionType]:
    return type(x) is FunctionType and not hasattr(x, "__wrapped__")


def _step(
    turning: Rotation,
    attend: Any,
    angles: Any,
    size: int | None,
    cache: Any,
    layer_idx: Any,
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    /,
    attention_mask: Any = None,
    position_bias: Any = None,
    **options: Any,
) -> Tensor | None:
    """The heads (B, 1, H, V) of one token a row; None where the module's own code has to run."""
    stepped = getattr(cache, "stepped", None)
    layer = None if stepped is None or attend is not headwise_attention else stepped(layer_idx)
    if layer is None or type(query) is not Tensor or query.ndim != 4 or query.shape[2] != 1:
        return None
    mask, scores = mask_of_step(attention_mask, layer.columns[0] + 1), _scores_of(**options)
    if mask is None or scores is None or not nobody_takes_part(module, query, key):
        return None
    if position_bias is not None:
        if type(position_bias) is not Tensor or position_bias.ndim != 4 or not position_bias.is_cpu:
            return None
        mask = mask & bias(position_bias)
    out = turned_step(layer, query, key, value, turning, angles, size, mask, scores)
    return None if out is None else out.transpose(1, 2)


def turned_step(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    turning: Rotation,
    angles: Any,
    size: int | None,
    mask: Mask,
    scores: Scores,
    /,
) -> Tensor | None:
    """The heads (B, H, 1, V), by a layer of a cache; None where it does not take the step, or angles are others."""
    turn = None
    if angles is not None:
        turn = turn_of(angles, query, turning, size)
        if turn is None:
            return None
    out: Tensor | None = layer.step(query, key, value, turn=turn, mask=mask, scores=scores)
    return out


def _scores_of(
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool | None = False,
    is_causal: bool | None = None,  # one query sees all that is there
    **others: Any,
) -> Scores | None:
    """What a call does to scores; None where it asks for more than a step gives."""
    if dropout or output_attentions or not (scaling is None or isinstance(scaling, (float, int))):
        return None
    if not all(value is None or name in HARMLESS for name, value in others.items()):
        return None
    return Scores(scaling, softcap, s_aux) if softcap is None or softcap > 0 else None


def nobody_takes_part(module: Any, query: Tensor, key: Any) -> bool:
    """Whether nobody else has a part in a module's call: no training, probes, other processes, collected attentions."""
    groups = getattr(module, "num_key_value_groups", None)
    return (
        not module.training
        and type(key) is Tensor
        and key.ndim == 4
        and (groups is None or key.shape[1] * groups == query.shape[1])
        and not watched(module)
        and whole_batch() is None
        and current() is None
        and not attentions_are_collected()
        and not (dist.is_available() and dist.is_initialized() and heads_here(module, query, key) is not None)
    )


def mask_of_step(mask: Any, S: int) -> Mask | None:
    """The mask of one query and S keys; None for one that is no mask of rules."""
    if mask is None:
        return EVERYTHING
    if type(mask) is not StructuralMask or mask.shape[2:] != (1, S) or mask.exposed:
        return None
    return mask.mask


def turn_of(pair: tuple[Any, Any], x: Tensor, turning: Rotation, size: int | None) -> Turn | None:
    """The rotation by (cos, sin), (B|1, 1, n) each, as the model's own code computes it; None for other tensors.

    Where the code says itself how much of a head turns, `size` is that.
    """
    cos, sin = pair
    if not type(cos) is type(sin) is Tensor or cos.ndim != 3 or cos.shape != sin.shape or cos.dtype != sin.dtype:
        return None
    (rows, tokens, n), D = cos.shape, x.shape[3]
    n = 2 * n if turning.angles == "pair" else n
    fits = n == (D if size is None else size) or (turning.partly and n < D)
    if not fits or rows not in (1, x.shape[0]) or tokens != 1 or n % 2:
        return None
    if cos.dtype != x.dtype and not (cos.dtype == torch.float32 and (turning.back or turning.wide)):
        return None
    if turning.wide:
        cos, sin = cos.float(), sin.float()
    if turning.angles == "first":
        cos, sin = cos[..., : n // 2], sin[..., : n // 2]
    return Turn(cos, sin, n, interleaved=turning.interleaved)

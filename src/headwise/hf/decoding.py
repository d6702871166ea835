"""A decode step of a transformers layer in one call, where the code of its attention is known.

transformers calls attention functions after rotation and cache; each is some operations of torch, and some calls of
Python, more than the attention of one token. `make_cache` therefore prepares the classes of attention whose `forward`
and whose rotation read, but for names of types and comments, like one of those here: with a cache of ours and one token
a row, their projections are called as before, and between them one function of the native kernel, which rotates,
appends and attends. Everything else, and every other class, runs its own code. The numbers are the same, bit by bit.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import lru_cache, wraps
from hashlib import blake2b
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..nn.sharded import current
from ..nn.steps import heads_of
from ..ops.masks.compose import Mask
from ..ops.native.step import Scores, Turn, runs_plain
from .attention import HARMLESS, attentions_are_collected, headwise_attention
from .interface import NAME
from .masks import StructuralMask
from .sessions import watched
from .whole import whole_batch


class Form(NamedTuple):
    """What an attention's `forward` does around the rotation.

    Attributes:
        norms: where q_norm and k_norm stand: "before" or "after" heads and tokens change places; "" for none.
        softcap: the module's attribute that caps the scores.
    """

    norms: str = ""
    softcap: str | None = None


class Rotation(NamedTuple):
    """What `apply_rotary_pos_emb` does.

    Attributes:
        partly: the angles say how much of a head turns; else they are for all of it.
        interleaved: pairs are neighbours, and the first half of the angles is theirs; else halves are.
    """

    partly: bool = False
    interleaved: bool = False


FORMS: dict[str, Form] = {
    "76cc852207c1f960": Form(),
    "c4d247fc414b97d6": Form(),
    "b70147fe6b8bc2f1": Form(),
    "10c38eb26a71819b": Form(norms="before"),
    "5021eaf501297a52": Form(norms="after"),
    "7529ea12e299bc73": Form(softcap="attn_logit_softcapping"),
}
"""The `forward` of attention classes, by the fingerprint of its code: those of Llama, Mistral, Qwen 2, Qwen 3, Apertus
and Gemma 2, which transformers has in some 45 files."""

ROTATIONS: dict[str, Rotation] = {
    "6624cf83ff11cb45 3f33ea54d4fc5890": Rotation(),
    "904b17fa28ba0560 3f33ea54d4fc5890": Rotation(partly=True),
    "b70d37fa6dae8b0c 55a9e6fe73e0f9f2": Rotation(partly=True, interleaved=True),
}
"""`apply_rotary_pos_emb` and its `rotate_half`, by fingerprint: those of Llama, GPT-NeoX and GLM."""


def fingerprint(function: Callable[..., Any]) -> str:
    """Of what a function does: its syntax without decorators, annotations and its docstring.

    >>> def one(x: int) -> int:
    ...     "Adds."
    ...     return x + 1
    >>> def other(x):
    ...     return (x +
    ...             1)
    >>> fingerprint(one) == fingerprint(other).replace("other", "one")
    True
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise OSError("no function")
    if isinstance(tree.body[0], ast.Expr) and isinstance(tree.body[0].value, ast.Constant):
        del tree.body[0]
    return blake2b(repr(_plain(tree)).encode(), digest_size=8).hexdigest()


_NOT_SAID = frozenset({"decorator_list", "annotation", "returns", "type_comment", "type_params", "kind", "ctx", "name"})


def _plain(node: Any) -> Any:
    """Syntax as tuples, alike in all versions of Python; names of functions are left out."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if name not in _NOT_SAID)
        return type(node).__name__, [(name, _plain(value)) for name, value in fields if value not in (None, [])]
    return [_plain(part) for part in node] if isinstance(node, list) else node


def prepare(model: nn.Module) -> None:
    """Have the attention classes of a model whose code is known ask at each call whether it is a step of ours."""
    for module in model.modules():
        owner = next(base for base in type(module).__mro__ if "forward" in vars(base))
        if "Attention" in owner.__name__:
            _prepare(owner)


@lru_cache(maxsize=4096)
def _prepare(owner: type[nn.Module]) -> None:
    theirs = vars(owner)["forward"]
    form, turning = _form_of(theirs)
    if form is None or turning is None:
        return
    names = theirs.__globals__
    rotation = names["apply_rotary_pos_emb"], names["rotate_half"]

    @wraps(theirs)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not args and runs_plain() and (names["apply_rotary_pos_emb"], names["rotate_half"]) == rotation:
            heads = _step(self, form, turning, **kwargs)
            if heads is not None:
                return self.o_proj(heads), None
        return theirs(self, *args, **kwargs)

    owner.forward = forward


def _form_of(forward: Any) -> tuple[Form | None, Rotation | None]:
    """The form of a `forward`, and that of its rotation; None where it is not known."""
    names = getattr(forward, "__globals__", {})
    functions = [forward, names.get("apply_rotary_pos_emb"), names.get("rotate_half")]
    known = names.get("ALL_ATTENTION_FUNCTIONS") is ALL_ATTENTION_FUNCTIONS
    if not known or not all(type(each) is FunctionType and not hasattr(each, "__wrapped__") for each in functions):
        return None, None
    try:
        of_forward, of_rotation, of_half = map(fingerprint, functions)
    except (OSError, TypeError, SyntaxError):  # no text to read
        return None, None
    return FORMS.get(of_forward), ROTATIONS.get(f"{of_rotation} {of_half}")


def _step(
    module: Any,
    form: Form,
    turning: Rotation,
    hidden_states: Any = None,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """The heads of one token a row side by side, (B, 1, H * V); None where the module's own code has to run."""
    cache = getattr(past_key_values, "stepped", None)
    layer = None if cache is None else cache(module.layer_idx)
    if layer is None or not _is_plain(module, hidden_states, kwargs):
        return None
    mask = _mask_of(attention_mask, layer.columns[0] + 1)
    turn = _turn_of(position_embeddings, hidden_states, module.head_dim, turning)
    if mask is None or turn is None or not layer.takes_steps(mask):
        return None
    D, B = module.head_dim, hidden_states.shape[0]
    heads = []
    for projection, norm in ((module.q_proj, "q_norm"), (module.k_proj, "k_norm"), (module.v_proj, "")):
        fused = projection(hidden_states)
        x = heads_of(fused, fused.shape[-1] // D, D) if type(fused) is Tensor else None
        if x is None:
            return None
        if norm and form.norms:
            x = getattr(module, norm)(x.transpose(1, 2) if form.norms == "before" else x)
            x = x.transpose(1, 2) if form.norms == "before" else x
        heads.append(x)
    query, key, value = heads
    if query.shape[1] != key.shape[1] * module.num_key_value_groups:
        return None
    softcap = None if form.softcap is None else getattr(module, form.softcap)
    out = layer.step(query, key, value, turn=turn, mask=mask, scores=Scores(module.scaling, softcap))
    return None if out is None else out.view(B, 1, -1)


def _is_plain(module: Any, x: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a module's call asks for nothing but the output of one token a row, on headwise."""
    return (
        type(x) is Tensor
        and x.ndim == 3
        and x.shape[1] == 1
        and not module.training
        and all(value is None or name in HARMLESS for name, value in kwargs.items())
        and type(getattr(module.q_proj, "weight", None)) is nn.Parameter  # no heads of other processes
        and module.config._attn_implementation == NAME
        and ALL_ATTENTION_FUNCTIONS.get(NAME) is headwise_attention
        and not watched(module)
        and whole_batch() is None
        and current() is None
        and not attentions_are_collected()
    )


def _mask_of(mask: Any, S: int) -> Mask | None:
    """The mask of one query and S keys; None for one that is no mask of rules."""
    if mask is None:
        return Mask(())
    if type(mask) is not StructuralMask or mask.shape[2:] != (1, S) or mask.exposed:
        return None
    return mask.mask


def _turn_of(embeddings: Any, x: Tensor, D: int, turning: Rotation) -> Turn | None:
    """The rotation by (cos, sin), (B|1, 1, n) each, as the model's own code computes it; None for other tensors."""
    cos, sin = embeddings if type(embeddings) is tuple and len(embeddings) == 2 else (None, None)
    if not type(cos) is type(sin) is Tensor or cos.ndim != 3 or cos.shape != sin.shape:
        return None
    rows, tokens, n = cos.shape
    alike = cos.dtype == sin.dtype == x.dtype and rows in (1, x.shape[0]) and tokens == 1 and n % 2 == 0
    if not alike or not (n == D or (turning.partly and n < D)):
        return None
    if turning.interleaved:
        cos, sin = cos[..., : n // 2], sin[..., : n // 2]
    return Turn(cos, sin, n, interleaved=turning.interleaved)

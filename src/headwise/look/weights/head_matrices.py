"""W_Q, W_K, W_V and W_O of every head, measured on the running model without knowledge of its architecture.

The matrices of a query, key or value are its derivatives with respect to the attention module's input, at one token:
so fused, low-rank and normalized projections need no special case. W_O is the output projection of the basis vectors.
Queries and keys of one token are rotated by the same angle, so rotary positions cancel in W_Q^T W_K.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.hooks.output_projections import output_projections
from ...nn.hooks.probe import AttentionCall, probe
from ...nn.hooks.thread_hooks import in_this_thread
from ..inputs.nonfinite import spoilt
from ..interventions.gates import learning
from ..interventions.losses import Reading


@dataclass(frozen=True, eq=False)
class Matrices:
    """The matrices of the H heads of one attention call; keys and values that heads share are repeated.

    Attributes:
        module, layer: as in a look's records.
        query: (H, D, M): applied to the query's residual stream, after the norm in `norms`.
        key: (H, D, N), value: (H, V, N): applied to the residual stream of the keys and values.
        output: (H, V, M): row v is the contribution of the v-th number of the head's output.
        lengths: (T, S), which identify the residual streams of one forward pass.
        norms: the modules that were folded into query and key: their output is the attention module's input.
    """

    module: str
    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    lengths: tuple[int, int]
    norms: tuple[str | None, str | None]


@dataclass(eq=False)
class Sources:
    """A record of the norm that made each tensor in a forward pass; `of` returns it for a tensor."""

    made: list[tuple[Tensor, str, nn.Module]] = field(default_factory=list)

    def of(self, x: Tensor) -> tuple[str, nn.Module] | None:
        """Return the first recorded module that made this tensor; None if there is none."""
        for out, name, part in self.made:
            if out.data_ptr() == x.data_ptr() and out.shape == x.shape:
                return name, part
        return None

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Record, inside the block, the outputs of modules without submodules and matrices, such as norms."""

        def after(name: str, part: nn.Module, _: object, out: object) -> None:
            if isinstance(out, Tensor):
                self.made.append((out, name, part))

        with ExitStack() as undo:
            for name, part in model.named_modules():
                if not any(True for _ in part.children()) and all(p.ndim < 2 for p in part.parameters()):
                    undo.callback(part.register_forward_hook(in_this_thread(partial(after, name))).remove)
            yield


def matrices(model: nn.Module, text: Reading) -> list[Matrices]:
    """Return the matrices of all heads, from one run on a short text; the derivative is taken at its last token.

    Raises:
        ValueError: no module takes the concatenated heads of an attention module, or it has no residual input (B, T,
            M).
    """
    names = output_projections(model, text.output)
    result: list[Matrices] = []
    sources, read = Sources(), dict[str, list[tuple[Tensor, Tensor]]]()

    def enter(name: str, _: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
        read[name] = []

        def cut(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.ndim != 3 or not x.is_floating_point():
                return x
            leaf = x.detach().requires_grad_()
            read[name].append((leaf, x))
            return leaf.clone()

        return tuple(map(cut, args)), {key: cut(x) for key, x in keywords.items()}

    def each(call: AttentionCall) -> Tensor:
        if call.module not in names and (found := spoilt(model)):
            raise ValueError(found)
        result.append(_of_call(call, output_projection(model, names, call.module), read[call.module], sources))
        return call.attend()

    with ExitStack() as undo:
        undo.enter_context(learning(model))
        undo.enter_context(sources.watching(model))
        seen = undo.enter_context(probe(model, each))
        for name in seen.expected:
            part, cut_here = model.get_submodule(name), in_this_thread(partial(enter, name))
            undo.callback(part.register_forward_pre_hook(cut_here, with_kwargs=True).remove)
        text.output(model)
    return result


def _of_call(
    call: AttentionCall, projection: nn.Module, read: list[tuple[Tensor, Tensor]], sources: Sources
) -> Matrices:
    assert call.value is not None
    H, K = call.query.shape[1], call.key.shape[1]
    query, of_query = _derivative(call, call.query, read, sources)
    key, of_key = _derivative(call, call.key, read, sources)
    value, _ = _derivative(call, call.value, read, sources)
    return Matrices(
        call.module,
        call.order,
        query,
        key.repeat_interleave(H // K, 0),
        value.repeat_interleave(H // K, 0),
        written_by(projection, H, call.value.shape[3], call.value),
        (call.query.shape[2], call.key.shape[2]),
        (of_query, of_key),
    )


def _derivative(
    call: AttentionCall, made: Tensor, read: list[tuple[Tensor, Tensor]], sources: Sources
) -> tuple[Tensor, str | None]:
    """Return the derivative of the last token's vectors by its residual, (heads, size, M) float32, and the norm."""
    size = made.shape[3]
    for leaf, x in read:
        rows = []
        for head in made[0, :, -1]:
            eye = torch.eye(size, dtype=made.dtype, device=made.device)
            [grad] = torch.autograd.grad(
                head, leaf, eye, retain_graph=True, allow_unused=True, is_grads_batched=True
            ) if made.requires_grad else [None]  # fmt: skip
            if grad is None:
                break
            tokens_first = leaf.shape[0] != made.shape[0]  # (T, B, M), the default of torch's own modules
            rows.append((grad[:, -1, 0] if tokens_first else grad[:, 0, -1]).float())
        else:
            norm = sources.of(x)
            whole = torch.stack(rows)
            return (whole, None) if norm is None else (whole @ linear_part(norm[1], x), norm[0])
    raise ValueError(
        f"module {call.module!r} is given no residual (B, T, M) that its queries, keys and values come from, so heads "
        "have no matrices to compose"
    )


def output_projection(model: nn.Module, names: Mapping[str, str], module: str, so: str = "") -> nn.Module:
    """Return the output projection of an attention module, whose name `names` has.

    Raises:
        ValueError: no module takes its concatenated heads; the message ends in `so`.
    """
    if module not in names:
        raise ValueError(
            f"no module reads the heads of {module!r} side by side (a gate or a norm stands between), so it has no W_O "
            f"a head{so}"
        )
    return model.get_submodule(names[module])


@torch.no_grad()
def linear_part(norm: nn.Module, like: Tensor) -> Tensor:
    """Return A (M, M) float32, y = A x: a norm without its bias and without the scale that depends on x.

    From the basis vectors at root mean square 1 and their negatives: diag(w) of an RMS norm; diag(w) times the
    subtraction of the mean for a layer norm (up to a factor that differs from 1 by less than 1 / M).
    """
    size = like.shape[-1]
    basis = torch.eye(size, dtype=like.dtype, device=like.device) * size**0.5
    odd: Tensor = norm(basis[None]).float() - norm(-basis[None]).float()
    return odd[0].mT / (2 * size**0.5)


@torch.no_grad()
def written_by(projection: nn.Module, heads: int, size: int, like: Tensor) -> Tensor:
    """Return an output projection's result for each number of each head, (H, V, M) float32, without the bias."""
    basis = torch.eye(heads * size, dtype=like.dtype, device=like.device)
    out: Tensor = projection(basis[None])[0].float() - projection(torch.zeros_like(basis[None, :1]))[0].float()
    return out.unflatten(0, (heads, size))

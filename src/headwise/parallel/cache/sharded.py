"""A key-value cache whose tokens are split over ranks, for sequences that do not fit in the memory of one device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from typing_extensions import override

from ...cache.base import KVCache, Stored
from ...cache.paged import PagedCache
from ...cache.rolling import RollingCache
from ...cache.static import StaticCache
from ...distributed.comm import Comm
from ...ops.attention import attention
from ...ops.masks.constructors import window
from ...ops.masks.mask import Mask, as_mask
from ...ops.masks.rules import Band
from ...ops.sharding.heads import Share
from ...ops.storage.paged import PAGE
from ...shapes import check_gate, check_options, compute_dtype
from ...shapes.arguments import check_counts, check_flags, shown, whole_numbers
from ..context_layouts.agreement import digest, mask_text, sinks_text
from .merge_outputs import HeadExchange, merged
from .ownership import TokenOwnership, owned_counts, owned_indices, select_tokens
from .shard_mask import mask_at, shard_mask, spans

APPEND = "append to a ShardedCache"
OPTIONS = ("scale", "softcap", "sinks", "gate", "return_lse", "backend", "dropout")
ShardedT = TypeVar("ShardedT", bound="ShardedCache")


class ShardedCache(KVCache):
    r"""A key-value cache split by tokens: block n of the tokens is on rank n mod N.

    $$\text{out} = \sum_r e^{l_r - l}\, \text{out}_r, \qquad l = \log \sum_r e^{l_r}$$

    Each rank computes attention over its own tokens. The partial outputs are merged in float32 by their lse, then the
    sinks are added. The output equals that of one cache except for rounding, for any number of ranks and key-value
    heads. Use it like any cache, with the same calls on every rank: `headwise.attention(query, cache)`,
    ``mha(x, cache=cache)``. Ranks without tokens in the window send nothing. For inference only: no gradients.

    Args:
        kind: `StaticCache`, `PagedCache` or `RollingCache`: the cache class that holds each rank's tokens.
        sizes: the sizes that `kind` takes, for all ranks together; the pool of a `PagedCache` is this rank's own.
        group: process group, or `DeviceMesh` of one dimension; all processes by default.
        block: number of consecutive tokens on one rank; 1 is the most even split, 128 splits page by page.
        own_heads: None: every rank passes all heads and gets all back. An int: the total number of query heads. Each
            rank then passes only its own query heads and the key-value heads that they read, split as in
            `tensor_parallel`, and gets the output of its own heads.
        timeout: seconds to wait for another rank, for this group from now on; 30 by default.
        options: options of `kind`: capacity, window, first, chunk, dtype, shared, causal, device.

    Attributes:
        local: the cache of class `kind` with this rank's tokens. Its lengths count only these tokens.
        owners: the `TokenOwnership` of this rank.

    Raises:
        TypeError, ValueError: the errors of `kind` and of `Comm`.

    Example::

        cache = headwise.parallel.ShardedCache(StaticCache, 1, 8, 64, capacity=1_000_000)
        out, cache = mha(x, cache=cache)      # on every rank
    """

    keys = None  # no rank has all keys, so latent attention uses its absorbed form

    def __init__(
        self,
        kind: type[KVCache],
        *sizes: Any,
        group: ProcessGroup | DeviceMesh | None = None,
        block: int = 1,
        own_heads: int | None = None,
        timeout: float | None = None,
        **options: Any,
    ) -> None:
        self.comm = Comm.of(group, timeout)
        check_counts(1, block=block)
        self.owners, self.own_heads = TokenOwnership(self.comm.rank, self.comm.world, block), own_heads
        self.capacity: int | None = None
        self.window: int | None = None
        self.first = 0
        if kind is RollingCache:
            seen: Any = options.get("window")
            self.first, chunk = options.get("first", 0), options.get("chunk", PAGE)
            check_counts(1, window=seen, chunk=chunk)
            check_counts(first=self.first)
            self.window, self.chunk = seen, chunk
            # The window is one larger because the local cache counts the next token as its own.
            options |= {"window": self.owners.most(seen) + 1, "first": self.owners.count(self.first)}
            options["chunk"] = self.owners.most(chunk)
        elif kind is StaticCache:
            room: Any = options.get("capacity")
            self.capacity = room
            check_counts(1, capacity=room)
            options["capacity"] = max(1, self.owners.count(room))
        elif kind is not PagedCache:
            raise TypeError(f"a sharded cache is a StaticCache, a PagedCache or a RollingCache; got {shown(kind)}")
        self.local: Any = kind(*sizes, **options)
        own = self.local
        dims = (own.batch, own.num_kv_heads, own.head_dim, own.value_dim)
        super().__init__(*dims, own.dtype, shared=own.shared, causal=own.causal)
        share = None
        if own_heads is not None:
            check_counts(1, own_heads=own_heads)
            share = Share(own_heads, own.num_kv_heads, self.comm.world, self.comm.rank)
            self.num_kv_heads = len(share.keys)  # the number of key-value heads in one append
        self._of, self._told = HeadExchange(self.comm, share), True
        self._order = 0  # a checksum of the arguments of all `reorder` calls

    @property
    @override
    def nbytes(self) -> int:
        """The size in bytes of this rank's tokens."""
        return int(self.local.nbytes)

    @property
    @override
    def device(self) -> torch.device:
        return self.local.device

    @override
    def __reduce__(self) -> Any:
        raise TypeError(
            "a ShardedCache holds a group of processes, which no file does: save `local` and `lengths` on every rank, "
            "and give them to a new one, cache.local = local, then cache.set_lengths(lengths)"
        )

    @override
    def view(self) -> tuple[Stored, Stored]:
        raise ValueError(
            f"no rank has all tokens of a ShardedCache, so there is no view of them; `local` has {self.local.lengths} "
            f"of {self.lengths}; attend it by headwise.attention(query, cache)"
        )

    @override
    def _rule(self, offset: Tensor | None) -> Mask:
        return super()._rule(offset) if self.window is None else window(self.window, offset=offset, first=self.first)

    # --- append -------------------------------------------------------------------------------------------------------

    @override
    def append(
        self: ShardedT,
        key: Tensor,
        value: Tensor | None = None,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        side: Literal["right", "left"] = "right",
    ) -> ShardedT:
        """Append T tokens to each row; each rank keeps its own. The arguments are those of any cache.

        Raises:
            TypeError, ValueError: the errors of any cache, on this rank.
            RankError: another rank has no room or got wrong arguments; the cache is unchanged then.
        """
        return super().append(key, value, lengths=lengths, side=side)

    @override
    def _append(self: ShardedT, key: Tensor, value: Tensor | None, lengths: Any, side: Any) -> ShardedT:
        self._told = self.own_heads is None and type(self.local) is not PagedCache
        try:
            _check_learns(key, value)
            return super()._append(key, value, lengths, side)
        except Exception as error:
            if not self._told:  # the other ranks wait for this rank's keys and must learn of the error
                self.comm.agree(APPEND, {}, error=error)
            raise

    @override
    def _make_room(self, counts: list[int]) -> None:
        ends = [have + n for have, n in zip(self.lengths, counts, strict=True)]
        if self.capacity is not None and max(ends) > self.capacity:
            raise ValueError(
                f"a ShardedCache of capacity {self.capacity} has no room for {max(ends)} tokens: make it larger, or "
                "truncate() it"
            )
        if self.chunk is not None and max(counts) > self.chunk:
            raise ValueError(
                f"this ShardedCache takes at most chunk = {self.chunk} tokens at a time; got {max(counts)}: append and "
                "attend piece by piece, or make it with a larger chunk"
            )

    @override
    def _write(self, key: Tensor, value: Tensor | None, counts: list[int], starts: list[int]) -> None:
        rows = [*zip(self.lengths, counts, starts, strict=True)]
        own, error, self._told = owned_indices(self.owners, rows), None, True
        tensors = [key] if value is None else [key, value]
        if self.own_heads is not None:
            self.comm.agree(APPEND, self._state() | {"tokens": f"{tuple(key.shape)}, {key.dtype}, {rows}"})
            owners = map(self.owners.of, range(self.comm.world))
            tensors = self._of.exchange_tokens(tensors, [owned_indices(owner, rows) for owner in owners])
        elif own[0]:
            tensors = [select_tokens(x, own) for x in tensors]
        before = list(self.local.lengths)
        if own[0]:
            try:
                self.local.append(*tensors, lengths=owned_counts(self.owners, rows))
            except Exception as full:
                error = full
        if type(self.local) is PagedCache:  # each rank has its own page pool, so only one rank may be full
            try:
                self.comm.agree(APPEND, self._state(), error=error)
            except (RuntimeError, ValueError):
                if error is None:
                    self.local.truncate(before)
                raise
        elif error is not None:
            raise error

    def _state(self) -> dict[str, Any]:
        """Return the values that must be equal on all ranks before an operation."""
        return {
            "kind": type(self.local).__name__,
            "cache": f"block={self.owners.block}, own_heads={self.own_heads}, window={self.window}, first={self.first}",
            "sizes": f"{self.batch}, {self.num_kv_heads}, {self.head_dim}, {self.value_dim}, {self.dtype}",
            "lengths": f"{digest(torch.tensor(self.lengths, device='cpu')):08x}, at most {max(self.lengths)}",
            "rows of reorder()": f"{self._order:08x}",
        }

    # --- attend -------------------------------------------------------------------------------------------------------

    @override
    def attend(self, query: Tensor, *, mask: Mask | Tensor | None = None, **options: Any) -> Any:
        """Compute attention of queries to the tokens of all ranks: `headwise.attention(query, cache)`, on every rank.

        Args:
            query: (B, H, T, D), the same on all ranks; with `own_heads` the query heads of this rank.
            mask: an additional mask, the same on all ranks; for a rolling cache only `window()` or `causal()`. With
                `own_heads` it must be the same for all heads.
            options: `scale`, `softcap`, `sinks`, `gate`, `return_lse` and `backend` of `headwise.attention`; with
                `own_heads`, sinks and gate belong to this rank's heads.

        Returns:
            out (B, H, T, V), with return_lse the pair of out and lse (B, H, T): for all heads, or with `own_heads` for
            this rank's heads. Without `own_heads` the result is bitwise equal on every rank.

        Raises:
            TypeError, ValueError: the errors of any cache, on this rank; or an unknown option.
            RankError, RankMismatch: as in `context_parallel`.
        """
        return super().attend(query, mask=mask, **options)

    @override
    def _attend(self, query: Tensor, mask: Mask | Tensor | None, options: dict[str, Any]) -> Any:
        operation = "attention to a ShardedCache"
        with self.comm.before(operation):
            numbers, rules = self._checked(query, mask, options)
            B, H, T, D = query.shape
            same = self._state() | {
                "query": f"{query.dtype}, {(B, T, D)}, {H}",
                "mask": mask_text(rules),
                "options": f"{numbers}, return_lse={bool(options.get('return_lse'))}",
                "sinks": sinks_text(options.get("sinks"), self.own_heads),
            }
        self.comm.agree(operation, same)
        # A backend chosen by name raises the same error on all ranks, so the group stays usable.
        with torch.no_grad(), self.comm.telling() if numbers["backend"] == "auto" else nullcontext():
            return self._attend_parts(query.detach(), rules, numbers, options)

    def _checked(self, query: Tensor, mask: Any, options: dict[str, Any]) -> tuple[dict[str, Any], Mask]:
        """Return the options (scale, softcap, backend) and the mask over all tokens; raises for invalid arguments."""
        unknown = options.keys() - set(OPTIONS)
        if unknown:
            raise TypeError(f"a ShardedCache is attended with {', '.join(OPTIONS)}; got {', '.join(sorted(unknown))}")
        if options.get("dropout"):
            raise ValueError(f"a ShardedCache is for inference: dropout is 0; got {shown(options['dropout'])}")
        T = self.check_query(query)
        H = query.shape[1]
        check_flags(return_lse=options.get("return_lse", False))
        sinks, mask = options.get("sinks"), as_mask(mask)
        _check_learns(query, sinks, options.get("gate"), mask)
        scale, softcap, _ = check_options(query, options.get("scale"), options.get("softcap"), sinks, 0.0)
        if options.get("gate") is not None:
            check_gate(options["gate"], (self.batch, H, T, self.value_dim), query.device)
        if self.window is not None and not all(isinstance(rule, Band) and not rule.kept for rule in mask.parts):
            raise ValueError(
                f"a rolling ShardedCache takes a further window() or causal() alone, for what else counts places among "
                f"tokens that are gone; got {mask}"
            )
        if H % self.num_kv_heads and self.own_heads is None:
            raise ValueError(f"H is a multiple of K = {self.num_kv_heads} key-value heads; got H = {H}")
        if self.own_heads is None:
            mask = mask.sized(self.batch, H)
        elif H * self.comm.world != self.own_heads:
            raise ValueError(f"of {self.own_heads} query heads each of {self.comm.world} ranks passes its own; got {H}")
        S, cpu = max(self.lengths), torch.device("cpu")
        rules = self.rules(T, self.lengths, mask.to(cpu), cpu).computed_in(compute_dtype(query))
        rules.check(self.batch, H, T, S, cpu)
        if self.own_heads is not None and any(x is not None and x.shape[1] > 1 for x in _corner(rules, T, S)):
            raise ValueError("with own_heads a mask is the same for all heads; got one that has an axis of heads")
        return {"scale": scale, "softcap": softcap, "backend": options.get("backend", "auto")}, rules

    def _attend_parts(self, query: Tensor, rules: Mask, numbers: dict[str, Any], options: dict[str, Any]) -> Any:
        query, T, S = self._of.queries(query), query.shape[2], max(self.lengths)
        seen = self._seen(rules, T, S)
        owners = map(self.owners.of, range(self.comm.world))
        active = [one.rank for one in owners if any(one.count(b) > one.count(a) for a, b in seen)]
        part = None
        if self.comm.rank in active:
            key, value = self.local.view()
            mask = self._local_mask(rules, T, S).to(query.device)
            part = attention(query, key, value, mask=mask, return_lse=True, **numbers)
        kept = merged(self._of, query, self.value_dim, active, part, options.get("sinks"))
        out, lse = self._of.back(kept, query, bool(options.get("return_lse")))
        if options.get("gate") is not None:
            out = out * check_gate(options["gate"], tuple(out.shape), out.device).to(out.dtype)
        return (out, lse) if options.get("return_lse") else out

    def _seen(self, rules: Mask, T: int, S: int) -> list[tuple[int, int]]:
        """Return intervals of positions that contain every token that a query attends to."""
        if self.window is None:
            return spans(rules, T, S)
        return [(0, min(self.first, S)), (max(min(self.lengths) - T - self.window + 1, 0), S)]

    def _local_mask(self, rules: Mask, T: int, S: int) -> Mask:
        columns = self.local.columns
        if self.window is None:
            return shard_mask(self.owners, rules, T, S, columns)
        kept = -(-self.local.first // PAGE) * PAGE
        column = torch.arange(max(columns), device="cpu")
        gone = torch.tensor(self.local.dropped, device="cpu")[:, None]
        return mask_at(self.owners.place(column + gone * (column >= kept)), rules, T, S, columns)

    # --- truncate, reorder, fork --------------------------------------------------------------------------------------

    @override
    def truncate(self: ShardedT, lengths: int | Sequence[int]) -> ShardedT:
        wanted = whole_numbers("lengths", [lengths] * self.batch if isinstance(lengths, int) else lengths)
        own = [self.owners.count(n) for n in wanted]
        if len(wanted) != self.batch or any(not 0 <= n <= have for n, have in zip(wanted, self.lengths, strict=False)):
            raise ValueError(
                f"truncate keeps the first tokens of each row, at most what is there; got {wanted} for lengths "
                f"{self.lengths}"
            )
        if self.window is not None:  # no rank may go back to tokens that any rank has dropped
            error: Exception | None = None
            try:
                self.local.fork().truncate(own)
            except ValueError:
                error = ValueError(
                    f"a rolling ShardedCache cannot go back from {self.lengths} to {wanted} tokens: of the "
                    f"{self.window} that the next one sees, some are gone; remember() keeps more"
                )
            self.comm.agree("truncate of a ShardedCache", self._state() | {"to": str(wanted)}, error=error)
        self.local.truncate(own)
        self.set_lengths(wanted)
        return self

    def remember(self: ShardedT, tokens: int) -> ShardedT:
        """Keep `tokens` more tokens than a query attends to, as in `RollingCache`; other kinds never drop tokens."""
        check_counts(tokens=tokens)
        if self.window is not None:
            self.local.remember(self.owners.most(tokens))
        return self

    @override
    def reorder(self: ShardedT, rows: Tensor | Sequence[int]) -> ShardedT:
        """Reorder the rows, with the same order on all ranks; if ranks differ, the next `attend` raises."""
        wanted = whole_numbers("rows", rows)
        self.local.reorder(rows)
        self.set_rows(wanted)
        self._order = digest(torch.tensor([self._order, *wanted], device="cpu"))
        return self

    @override
    def fork(self: ShardedT) -> ShardedT:
        new = copy(self)
        new.local = self.local.fork()
        return new


def _check_learns(*what: Any) -> None:
    """Raise if an argument requires a gradient, because this cache has none."""
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) or getattr(x, "learns", False) for x in what):
        raise ValueError("a ShardedCache has no gradient: append and attend under torch.no_grad()")


def _corner(rules: Mask, T: int, S: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask and the bias of the first query and key, with all axes that the mask has."""
    one, cpu = slice(0, 1), torch.device("cpu")
    return rules.allowed(T, S, rows=one, cols=one, device=cpu), rules.added(T, S, rows=one, cols=one, device=cpu)

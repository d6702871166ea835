"""Layout `gather`: every rank gets all keys and values, one key-value head at a time, and attends its queries to them.

All-gather context parallelism (Dubey et al. 2024, arXiv 2407.21783, section 3.3.2). Nothing is merged: a row meets all
its keys in one call, as in one process, and has the same bits for any number of ranks. The next head is on its way
while one is attended. Backward: the keys once more, and a reduce-scatter of their gradients in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..plan.places import Stretch
from ..shapes import compute_dtype
from .comm import Block, Pending
from .job import Job
from .merge import sink_gradient
from .rectangle import Partial, Rectangle, attend, gradient
from .ring import Travellers, Unfolded, expanded

SPLIT = 1024
"""Keys that the native kernel sums on their own where rows are few: cut there, the sums are those of one process."""


class Stages:
    """The gather of what travels, head by head, for one rank of a job."""

    def __init__(self, job: Job, held: Travellers) -> None:
        self.job, self.held = job, held
        self.lengths = [sum(b - a for a, b in own) for own in job.keys]
        self.count = job.kv_heads
        self.others = [rank for rank in range(job.comm.world) if rank != job.comm.rank]

    def post(self, stage: int) -> Pending:
        """Starts the messages of a head."""
        own = torch.cat([x[:, stage].reshape(-1) for x in self.held])
        sends = dict.fromkeys(self.others, own)
        receives = {rank: Block((self._numbers(rank),), own.dtype) for rank in self.others}
        return self.job.comm.exchange("gather", sends, receives, step=stage)

    def _numbers(self, rank: int) -> int:
        return self.held[0].shape[0] * self.lengths[rank] * sum(x.shape[3] for x in self.held)

    def whole(self, stage: int, pending: Pending) -> Travellers:
        """A head over all keys, in their order: (B, 1, S, width) each."""
        heard, S = pending.wait(), sum(self.lengths)
        found = [x.new_empty((x.shape[0], 1, S, x.shape[3])) for x in self.held]
        for rank, own in enumerate(self.job.keys):
            parts = [x[:, stage : stage + 1] for x in self.held] if rank not in heard else self.cut(heard[rank], rank)
            for (a, b), at in self.job.local(own):
                for to, x in zip(found, parts, strict=True):
                    to[:, :, a:b] = x[:, :, at]
        return found

    def cut(self, flat: Tensor, rank: int) -> Travellers:
        """A rank's message as it was before it was sent."""
        B, found, at = self.held[0].shape[0], [], 0
        for x in self.held:
            count = B * self.lengths[rank] * x.shape[3]
            found.append(flat[at : at + count].view(B, 1, self.lengths[rank], x.shape[3]))
            at += count
        return found

    def send_home(self, stage: int, grads: Travellers) -> Pending:
        """Starts each rank's share of the gradients of a head over all keys on its way."""
        sends = {}
        for rank in self.others:
            pieces = [x[:, :, a:b] for x in grads for a, b in self.job.keys[rank]]
            sends[rank] = torch.cat([x.reshape(-1) for x in pieces])
        block = Block((self._numbers(self.job.comm.rank),), grads[0].dtype)
        receives = dict.fromkeys(self.others, block)
        return self.job.comm.exchange("gather backward", sends, receives, step=self.count + stage)

    def summed(self, stage: int, pending: Pending, grads: Travellers) -> Travellers:
        """The gradients of this rank's keys of a head: of all ranks, added up in their order."""
        heard, me = pending.wait(), self.job.comm.rank
        total: Travellers | None = None
        for rank in range(self.job.comm.world):
            if rank == me:
                parts = [torch.cat([x[:, :, a:b] for a, b in self.job.keys[me]], dim=2) for x in grads]
            else:
                parts = self._as_cut(heard[rank])
            total = parts if total is None else [x + y for x, y in zip(total, parts, strict=True)]
        assert total is not None
        return total

    def _as_cut(self, flat: Tensor) -> Travellers:
        """A message of gradients of this rank's keys: stretch after stretch of each part."""
        me, B, found, at = self.job.comm.rank, self.held[0].shape[0], [], 0
        for x in self.held:
            pieces = []
            for a, b in self.job.keys[me]:
                count = B * (b - a) * x.shape[3]
                pieces.append(flat[at : at + count].view(B, 1, b - a, x.shape[3]))
                at += count
            found.append(torch.cat(pieces, dim=2))
        return found

    def groups(self, stage: int) -> list[Stretch]:
        """The query heads that are attended together in a stage: those of the head; of what expands, a few a time."""
        if self.job.expansion is None:
            G = self.job.heads // self.job.kv_heads
            return [(stage * G, (stage + 1) * G)]
        few = max(1, self.held[0].shape[3] // self.job.value_dim)
        return [(h, min(h + few, self.job.heads)) for h in range(0, self.job.heads, few)]


def span_of(job: Job, rows: Stretch) -> Stretch | None:
    """The keys that these queries are attended to."""
    span = job.reach(rows, (0, job.S))
    return None if span is None else (span[0] // SPLIT * SPLIT, span[1])


class Gather(torch.autograd.Function):
    """out and lse of this rank's queries over all ranks' keys."""

    @staticmethod
    def forward(ctx: Any, job: Job, *tensors: Any) -> Any:
        """out and lse."""
        with job.comm.telling():
            return _forward(ctx, job, *tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        """The gradients of what `forward` took."""
        with ctx.job.comm.telling():
            return _backward(ctx, grad_out, grad_lse)


def _forward(ctx: Any, job: Job, query: Tensor, key: Tensor, value: Tensor | None, *rest: Any) -> Any:
    sinks, n, *tensors = rest
    stages = Stages(job, [key] if value is None else [key, value])
    here = job.with_leaves(query, [x.detach() for x in tensors[:n]])
    B, H, T, _ = query.shape
    wide = compute_dtype(query)
    out = query.new_zeros((B, T, H, job.value_dim)).transpose(1, 2)
    lse = query.new_full((B, H, T), -torch.inf, dtype=wide)
    ends = torch.stack([lse, torch.zeros_like(lse)])
    native = True
    pending = stages.post(0)
    for stage in range(stages.count):
        following = stages.post(stage + 1) if stage + 1 < stages.count else None
        one = stages.whole(stage, pending)
        for heads in stages.groups(stage):
            k, v = expanded(here, one, heads)
            few, logits = slice(*heads), None if sinks is None else sinks.detach()[slice(*heads)]
            for rows, at in here.local(here.queries[here.comm.rank]):
                span = span_of(here, rows)
                if span is None:
                    continue
                place, keys = Rectangle(rows, span, heads), slice(*span)
                part = attend(here, place, query[:, few, at], k[:, :, keys], v[:, :, keys], logits)
                out[:, few, at], lse[:, few, at] = part.out, part.lse
                if part.ends is None:
                    native = False
                else:
                    ends[:, :, few, at] = part.ends
        pending = following  # type: ignore[assignment]
    ctx.job, ctx.n = job, n
    ctx.save_for_backward(query, key, value, sinks, out, lse, ends if native else None, *tensors)
    ctx.set_materialize_grads(False)
    return out, lse


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
    query, key, value, sinks, out, lse, ends, *tensors = ctx.saved_tensors
    job, whole = ctx.job, Partial(out, lse, ends)
    job.comm.agree(f"backward of {job.name}", {})
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    stages = Stages(job, [key] if value is None else [key, value])
    sums = _Sums(job, query, tensors[: ctx.n], sinks)
    found: list[Travellers] = []
    waiting: tuple[int, Pending, Travellers] | None = None
    pending = stages.post(0)
    for stage in range(stages.count):
        following = stages.post(stage + 1) if stage + 1 < stages.count else None
        grads = sums.of_stage(stages, stage, stages.whole(stage, pending), whole, grad_out, grad_lse)
        if waiting is not None:
            found.append(stages.summed(*waiting))
        waiting = (stage, stages.send_home(stage, grads), grads)
        pending = following  # type: ignore[assignment]
    if waiting is not None:
        found.append(stages.summed(*waiting))
    dk, dv = [*(torch.cat(x, dim=1).to(key.dtype) for x in zip(*found, strict=True)), None][:2]
    of_sinks = None if sinks is None else sink_gradient(sinks, whole, grad_out, grad_lse)
    return None, sums.query, dk, dv, of_sinks, None, *sums.of_tensors()


class _Sums:
    """What a rank's queries add to gradients, stage by stage."""

    def __init__(self, job: Job, query: Tensor, leaves: list[Tensor], sinks: Tensor | None) -> None:
        self.sinks = None if sinks is None else sinks.detach()
        self.leaves = [x.detach().requires_grad_(x.requires_grad) for x in leaves]
        with torch.enable_grad():
            self.job = job.with_leaves(query, self.leaves)
        self.inputs, self.query = query, torch.zeros_like(query)
        self.learning = [x for x in self.leaves if x.requires_grad]
        self.sums: dict[int, Tensor] = {}

    def of_stage(
        self,
        stages: Stages,
        stage: int,
        one: Travellers,
        whole: Partial,
        grad_out: Tensor,
        grad_lse: Tensor | None,
    ) -> Travellers:
        """The gradient of what travelled, over all keys, in float32; the queries' is kept here."""
        job, wide = self.job, compute_dtype(self.inputs)
        total = [torch.zeros_like(x, dtype=wide) for x in one]
        for heads in stages.groups(stage):
            unfolded = Unfolded(job, one, heads)
            k, v = unfolded.pair
            dk, dv = (torch.zeros_like(x, dtype=wide) for x in (k, v))
            few = slice(*heads)
            for rows, at in job.local(job.queries[job.comm.rank]):
                span = span_of(job, rows)
                if span is None:
                    continue
                keys = slice(*span)
                some = gradient(
                    job,
                    Rectangle(rows, span, heads),
                    (self.inputs[:, few, at], k[:, :, keys], v[:, :, keys]),
                    whole.of(at, few),
                    grad_out[:, few, at],
                    None if grad_lse is None else grad_lse[:, few, at],
                    self.learning,
                    has_all=True,
                    sinks=None if self.sinks is None else self.sinks[few],
                )
                self.query[:, few, at] = some.query
                dk[:, :, keys] += some.key
                dv[:, :, keys] += some.value
                self.add(self.learning, some.leaves)
            grads, of_read = unfolded.folded(dk, dv)
            self.add(job.read, of_read)
            for x, grad in zip(total, grads, strict=True):
                x += grad
        return total

    def add(self, tensors: Any, grads: Any) -> None:
        """Adds to the gradients of tensors that all ranks have."""
        for x, grad in zip(tensors, grads, strict=True):
            if grad is not None:
                self.sums[id(x)] = self.sums[id(x)] + grad if id(x) in self.sums else grad

    def of_tensors(self) -> list[Tensor | None]:
        """The gradients of the mask's tensors and of those that an expansion reads, in their order."""
        return [self.sums.get(id(x)) for x in (*self.leaves, *self.job.read)]

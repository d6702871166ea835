"""Layout `ring`: queries stay, keys and values come by, a stretch at a time, while what is there is attended.

Ring Attention (Liu et al. 2023, arXiv 2310.01889): in step s rank r attends the keys of rank r - s. Here a stretch goes
straight from its owner to those whose queries may see it, and only the part that they may: a window is a halo, what a
mask rules out does not travel. Backward the same once more, by the lse over all keys; gradients of keys and values are
summed in float32 and go straight home.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..plan.places import Stretch
from ..shapes import compute_dtype
from .comm import Block, Pending
from .job import Job
from .merge import Merged, sink_gradient
from .rectangle import Partial, Rectangle, attend, gradient

Travellers = list[Tensor]
"""Keys and values (B, K, n, width), or the vectors that they are made of: what goes from rank to rank."""


class Traffic:
    """Who sends which keys to whom in which step, for one rank of a job."""

    def __init__(self, job: Job, widths: Sequence[int], batch: int, dtype: torch.dtype) -> None:
        self.job, self.widths, self.batch, self.dtype = job, widths, batch, dtype
        me, N = job.comm.rank, job.comm.world
        self.comes = [job.needed(me, (me - s) % N) for s in range(N)]
        self.goes = [job.needed((me + s) % N, me) for s in range(N)]

    def source(self, step: int) -> int:
        """Whose keys are attended in a step."""
        return (self.job.comm.rank - step) % self.job.comm.world

    def target(self, step: int) -> int:
        """Who attends this rank's keys in a step."""
        return (self.job.comm.rank + step) % self.job.comm.world

    def numbers(self, stretches: Sequence[Stretch]) -> int:
        """How many numbers so many keys take."""
        return sum(b - a for a, b in stretches) * self.batch * self.job.kv_heads * sum(self.widths)

    def bring(self, step: int, held: Travellers) -> Pending:
        """Starts the messages of a step: its keys come, own ones go."""
        own = self.job.keys[self.job.comm.rank]
        parts = [x[:, :, self.job.mine(own, part)] for part in self.goes[step] for x in held]
        block = Block((self.numbers(self.comes[step]),), self.dtype)
        sends = {self.target(step): torch.cat([x.reshape(-1) for x in parts])} if parts else {}
        receives = {self.source(step): block} if self.comes[step] else {}
        return self.job.comm.exchange("ring", sends, receives, step=step)

    def arrived(self, step: int, pending: Pending | None, held: Travellers) -> list[Travellers]:
        """The keys of a step, stretch by stretch."""
        me = self.job.comm.rank
        if step == 0:
            return [[x[:, :, self.job.mine(self.job.keys[me], part)] for x in held] for part in self.comes[0]]
        assert pending is not None
        heard = pending.wait()
        return self.cut(heard[self.source(step)], self.comes[step]) if self.comes[step] else []

    def cut(self, flat: Tensor, stretches: Sequence[Stretch]) -> list[Travellers]:
        """A message as it was before it was sent."""
        found, at = [], 0
        for a, b in stretches:
            one = []
            for width in self.widths:
                shape = (self.batch, self.job.kv_heads, b - a, width)
                count = self.numbers([(a, b)]) * width // sum(self.widths)
                one.append(flat[at : at + count].view(shape))
                at += count
            found.append(one)
        return found

    def send_home(self, step: int, grads: list[Travellers], wide: torch.dtype) -> Pending:
        """Starts the gradients of a step's keys on their way to their owner; those of own keys come."""
        sends = {self.source(step): torch.cat([x.reshape(-1) for one in grads for x in one])} if grads else {}
        block = Block((self.numbers(self.goes[step]),), wide)
        receives = {self.target(step): block} if self.goes[step] else {}
        return self.job.comm.exchange("ring backward", sends, receives, step=self.job.comm.world + step)


class Ring(torch.autograd.Function):
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
    held = [key] if value is None else [key, value]
    traffic = Traffic(job, [x.shape[3] for x in held], key.shape[0], key.dtype)
    here = job.with_leaves(query, [x.detach() for x in tensors[:n]])
    merged = Merged(query, job.value_dim)
    pending = None
    for step in range(job.comm.world):
        following = traffic.bring(step + 1, held) if step + 1 < job.comm.world else None
        for cols, part in zip(traffic.comes[step], traffic.arrived(step, pending, held), strict=True):
            k, v = expanded(here, part)
            for rows, at in here.local(here.queries[here.comm.rank]):
                span = here.reach(rows, cols)
                if span is not None:
                    keys = slice(span[0] - cols[0], span[1] - cols[0])
                    place = Rectangle(rows, span, (0, job.heads))
                    merged.add(at, attend(here, place, query[:, :, at], k[:, :, keys], v[:, :, keys]))
        pending = following
    merged.finish(sinks)
    whole = merged.result(query.dtype)
    ctx.job, ctx.n = job, n
    ctx.save_for_backward(query, key, value, sinks, *whole, *tensors)
    ctx.set_materialize_grads(False)
    return whole.out, whole.lse


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
    job, n = ctx.job, ctx.n
    query, key, value, sinks, out, lse, ends, *tensors = ctx.saved_tensors
    whole = Partial(out, lse, ends)
    job.comm.agree(f"backward of {job.name}", {})
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    held = [key] if value is None else [key, value]
    sums = _Sums(job, query, held, tensors[:n])
    traffic = sums.traffic
    pending: Pending | None = None
    home: Pending | None = None  # of the step before: with more of them in flight, a rank would hold all ranks' sums
    for step in range(job.comm.world):
        following = traffic.bring(step + 1, held) if step + 1 < job.comm.world else None
        parts = traffic.arrived(step, pending, held)
        grads = [
            sums.of_stretch(cols, part, whole, grad_out, grad_lse)
            for cols, part in zip(traffic.comes[step], parts, strict=True)
        ]
        if step == 0:
            sums.take(0, traffic.comes[0], grads)
        else:
            sums.take_home(step - 1, home)
            home = traffic.send_home(step, grads, sums.wide)
        pending = following
    sums.take_home(job.comm.world - 1, home)
    of_sinks = None if sinks is None else sink_gradient(sinks, whole, grad_out, grad_lse)
    dk, dv = [*(x.to(key.dtype) for x in sums.held), None][:2]
    return None, sums.query.to(query.dtype), dk, dv, of_sinks, None, *sums.of_tensors()


class _Sums:
    """The gradients of what a rank holds, summed over steps in float32."""

    def __init__(self, job: Job, query: Tensor, held: Travellers, leaves: Sequence[Tensor]) -> None:
        self.wide = compute_dtype(query)
        self.leaves = [x.detach().requires_grad_(x.requires_grad) for x in leaves]
        with torch.enable_grad():
            self.job = job.with_leaves(query, self.leaves)
        self.inputs = query
        self.traffic = Traffic(job, [x.shape[3] for x in held], held[0].shape[0], held[0].dtype)
        self.query = torch.zeros_like(query, dtype=self.wide)
        self.held = [torch.zeros_like(x, dtype=self.wide) for x in held]
        self.learning = [x for x in self.leaves if x.requires_grad]
        self.sums: dict[int, Tensor] = {}

    def of_stretch(
        self, cols: Stretch, part: Travellers, whole: Partial, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Travellers:
        """What this rank's queries add to the gradient of a stretch of keys; their own is added here."""
        job = self.job
        unfolded = Unfolded(job, part)
        k, v = unfolded.pair
        dk, dv = (torch.zeros_like(x, dtype=self.wide) for x in (k, v))
        for rows, at in job.local(job.queries[job.comm.rank]):
            span = job.reach(rows, cols)
            if span is None:
                continue
            keys = slice(span[0] - cols[0], span[1] - cols[0])
            some = gradient(
                job,
                Rectangle(rows, span, (0, job.heads)),
                (self.inputs[:, :, at], k[:, :, keys], v[:, :, keys]),
                whole.of(at),
                grad_out[:, :, at],
                None if grad_lse is None else grad_lse[:, :, at],
                self.learning,
            )
            self.query[:, :, at] += some.query
            dk[:, :, keys] += some.key
            dv[:, :, keys] += some.value
            self.add(self.learning, some.leaves)
        grads, of_read = unfolded.folded(dk, dv)
        self.add(job.read, of_read)
        return grads

    def add(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        """Adds to the gradients of tensors that all ranks have."""
        for x, grad in zip(tensors, grads, strict=True):
            if grad is not None:
                self.sums[id(x)] = self.sums[id(x)] + grad if id(x) in self.sums else grad

    def take(self, step: int, stretches: Sequence[Stretch], grads: list[Travellers]) -> None:
        """Adds the gradients of stretches of this rank's keys."""
        own = self.job.keys[self.job.comm.rank]
        for part, one in zip(stretches, grads, strict=True):
            for total, grad in zip(self.held, one, strict=True):
                total[:, :, self.job.mine(own, part)] += grad

    def take_home(self, step: int, pending: Pending | None) -> None:
        """Waits for what `send_home` of a step started, and adds what came for this rank's keys."""
        came = {} if pending is None else pending.wait()
        stretches, traffic = self.traffic.goes[step], self.traffic
        if came and stretches:
            self.take(step, stretches, traffic.cut(came[traffic.target(step)], stretches))

    def of_tensors(self) -> list[Tensor | None]:
        """The gradients of the mask's tensors and of those that an expansion reads, in their order."""
        return [self.sums.get(id(x)) for x in (*self.leaves, *self.job.read)]


class Unfolded:
    """Keys and values of what travelled, with a graph back to it where they are made of it."""

    def __init__(self, job: Job, part: Travellers, heads: Stretch | None = None) -> None:
        self.expansion, self.read = job.expansion, job.read
        if self.expansion is None:
            self.pair = (part[0], part[1])
            return
        with torch.enable_grad():
            self.source = part[0].detach().requires_grad_()
            self.made = self.expansion.function(self.source, *(heads or (0, job.heads)))
        self.pair = (self.made[0].detach(), self.made[1].detach())

    def folded(self, dk: Tensor, dv: Tensor) -> tuple[Travellers, list[Tensor | None]]:
        """The gradients of what travelled, and of the tensors that the expansion reads."""
        if self.expansion is None:
            return [dk, dv], []
        wanted = [x for x in self.read if x.requires_grad]
        grads = torch.autograd.grad(
            self.made, [self.source, *wanted], [dk.to(self.made[0].dtype), dv.to(self.made[1].dtype)], allow_unused=True
        )
        of = {id(x): grad for x, grad in zip(wanted, grads[1:], strict=True)}
        return [grads[0].to(dk.dtype)], [of.get(id(x)) for x in self.read]


def expanded(job: Job, part: Travellers, heads: Stretch | None = None) -> tuple[Tensor, Tensor]:
    """Keys and values of what travelled; without a graph."""
    if job.expansion is None:
        return part[0], part[1]
    with torch.no_grad():
        return job.expansion.function(part[0], *(heads or (0, job.heads)))

"""Reconstruct attention modules in closed form: solve their projections so that attention outputs what it did before.

No training: W_O by ridge regression on calibration text, from sums added up in float64, and then the values' matrix
given W_O, for attention is linear in both. Queries and keys stay, and with them what each head attends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...shapes.arguments import check_counts, check_functions, shown
from ..arguments import check_models
from .linear_matrix import Matrix
from .paired_models import Batch, ModuleBatch, Pair, Projections, batches_of, run_model
from .ridge import NormalEquations, best
from .value_solver import Sample, ValueSystem, solve_values

Inputs = Literal["original", "own"]


def check_kind_of_layers(layers: object) -> None:
    """Modules by name, and where their matrices are; raises TypeError."""
    if not isinstance(layers, Mapping) or not all(isinstance(where, Projections) for where in layers.values()):
        raise TypeError(f"layers are headwise.reshape.Projections by the name of a module; got {shown(layers)}")


@dataclass(frozen=True)
class Reconstruction:
    """What was done to one attention module.

    Attributes:
        module: Its name.
        before: The squared error of its output on text that was not fitted to, as a share of the output's squares.
        after: The same, reconstructed.
        ridge: What held W_O to what it was; None where it was left alone, for no fit did better.
        values: Whether the values' matrix was changed.
    """

    module: str
    before: float
    after: float
    ridge: float | None
    values: bool


def reconstruct_modules(
    changed: nn.Module,
    original: nn.Module,
    batches: Sequence[Batch],
    layers: Mapping[str, Projections],
    *,
    inputs: Inputs = "original",
    value_steps: int = 12,
    call: Callable[[nn.Module, Batch], Any] = run_model,
    progress: Callable[[int, int], None] | None = None,
) -> list[Reconstruction]:
    """Solve the output projections of `changed`, and then its values, anew, in place.

    Args:
        changed: A model with fewer or other heads, under the names of its original.
        original: What its attention modules should give out.
        batches: Calibration text without padding, at least two batches: ids (B, T), or the keywords of a call.
        layers: Attention modules by name, and where their matrices are.
        inputs: What the changed layers read while they are fitted: the "original" model's hidden states, or their
            "own", layer after layer, with the errors of those before.
        value_steps: Steps of conjugate gradients for the values of each layer; 0 leaves the values alone and takes
            one pass over the text in place of one a layer.
        call: How a batch is put through a model.
        progress: Called as ``progress(done, total)`` after each batch of text.

    Returns:
        What was done to each attention module, in the order in which they run.

    Raises:
        TypeError: a module that holds no matrix of its own.
        ValueError: `inputs` is neither, too few batches, or no such module in a model; an output projection that was
            not run, or that takes other than the heads side by side; heads or outputs that are not finite.

    Example:
        >>> import headwise
        >>> original, changed = headwise.MultiHeadAttention(12, 3), headwise.MultiHeadAttention(12, 3)
        >>> batches = [torch.randn(2, 31, 12) for _ in range(3)]
        >>> [done] = reconstruct_modules(changed, original, batches, {"": Projections("o_proj", "v_proj")})
        >>> done.after < done.before
        True
    """
    check_models(changed=changed, original=original)
    check_kind_of_layers(layers)
    check_functions(call=call, **({} if progress is None else {"progress": progress}))
    if not isinstance(inputs, str) or inputs not in ("original", "own"):
        raise ValueError(f'inputs is "original" or "own"; got {shown(inputs)}')
    check_counts(value_steps=value_steps)
    run = _Reconstructor(Pair(changed, original, layers, inputs == "original", call), *batches_of(batches), progress)
    with run.pair.watched(calls=value_steps > 0):
        run.begin(passes=len(layers) if value_steps or inputs == "own" else 1)
        if run.passes == 1 and not value_steps:
            sums = run.sums(run.order)
            return [run.solve_output(name, *sums[name]) for name in run.order]
        if not value_steps:
            return [run.solve_output(name, *run.sums([name])[name]) for name in run.order]
        return [run.solve_both(name, value_steps) for name in run.order]


class _Reconstructor:
    """One reconstruction: both models under hooks, the text to fit to and the text to check by."""

    def __init__(
        self, pair: Pair, fit: list[Batch], check: list[Batch], progress: Callable[[int, int], None] | None
    ) -> None:
        self.pair, self.fit, self.check, self.progress = pair, fit, check, progress
        self.order: list[str] = []
        self.passes = self.done = 0

    def begin(self, passes: int) -> None:
        """Run both models whole once, to see that all modules are there and in which order they run."""
        self.passes = passes
        for name, seen in self.pair.read(self.fit[0]).items():
            output = self.pair.layers[name].output
            if seen.heads is None or seen.target is None:
                raise ValueError(f"module {output!r} was not run in both models; name modules that a batch runs")
            self.projection(output)
        self.order = list(self.pair.order)

    def read(self, batches: list[Batch], until: str | None) -> Iterator[dict[str, ModuleBatch]]:
        """Yield what the modules see of each batch."""
        for batch in batches:
            yield self.pair.read(batch, until)
            self.done += 1
            if self.progress is not None:
                self.progress(self.done, self.passes * (len(self.fit) + len(self.check)))

    def projection(self, where: str) -> Matrix:
        """Return a projection of the changed model."""
        return Matrix.of(self.pair.changed.get_submodule(where), where)

    def sums(self, names: Sequence[str]) -> dict[str, tuple[NormalEquations, NormalEquations]]:
        """Normal equations of the output projections: of the text to fit to, and to check by."""
        until = names[-1] if len(names) == 1 else None
        matrices = {name: self.projection(self.pair.layers[name].output) for name in names}
        both = {name: (_empty(matrix), _empty(matrix)) for name, matrix in matrices.items()}
        for n, batches in enumerate((self.fit, self.check)):
            for seen in self.read(batches, until):
                for name, matrix in matrices.items():
                    both[name][n].add(_with_ones(seen[name].heads, matrix), seen[name].target)
        return both

    def solve_output(self, name: str, fit: NormalEquations, check: NormalEquations) -> Reconstruction:
        """Solve W_O and puts it in its place."""
        if not (fit.is_finite() and check.is_finite()):
            raise ValueError(
                f"module {name!r}: its heads or its outputs on this text hold NaN or infinity, and nothing is fitted "
                "to them; get the checkpoint anew, or do not reconstruct"
            )
        matrix = self.projection(self.pair.layers[name].output)
        start = _whole(matrix)
        W, ridge = best(fit, check, start)
        if ridge is not None:
            n = matrix.W.shape[0]
            matrix.W.copy_(W[:n])
            if matrix.b is not None:
                matrix.b.copy_(W[n])
        return Reconstruction(name, check.error(start), check.error(_whole(matrix)), ridge, values=False)

    def solve_both(self, name: str, steps: int) -> Reconstruction:
        """Solve W_O, then W_V given it, then W_O once more."""
        where = self.pair.layers[name]
        matrix = self.projection(where.output)
        samples: list[list[Sample]] = []
        sums = _empty(matrix), _empty(matrix)
        for n, batches in enumerate((self.fit, self.check)):
            samples.append([])
            for seen in self.read(batches, name):
                sums[n].add(_with_ones(seen[name].heads, matrix), seen[name].target)
                if where.value is not None:
                    samples[n].append(_sample(seen[name], name))
        done = self.solve_output(name, *sums)
        if where.value is None:
            return done
        value = self.projection(where.value)
        rows = (
            torch.arange(value.W.shape[1], device="cpu")
            if where.value_rows is None
            else torch.tensor(where.value_rows, device="cpu")
        )
        call = samples[0][0].call
        layer = ValueSystem(matrix.W, matrix.b, None if value.b is None else value.b[rows], call.key.shape[1])
        _check_heads(layer, value.W[:, rows], samples[0][0], name)
        W = solve_values(layer, value.W[:, rows], samples[0], samples[1], steps)
        if W is None:
            return done
        value.W[:, rows] = W
        sums = _empty(matrix), _empty(matrix)
        for n, some in enumerate(samples):
            for sample in some:
                sums[n].add(_with_ones(layer.heads(W, sample.call, sample.source), matrix), sample.target)
        last = self.solve_output(name, *sums)
        return Reconstruction(name, done.before, last.after, last.ridge or done.ridge, values=True)


def _whole(matrix: Matrix) -> Tensor:
    """Return the matrix in float64, its bias as a last row."""
    parts = [matrix.W] if matrix.b is None else [matrix.W, matrix.b[None]]
    return torch.cat(parts).to(torch.float64)


def _empty(matrix: Matrix) -> NormalEquations:
    n, m = matrix.W.shape
    return NormalEquations(n + (matrix.b is not None), m, matrix.W.device)


def _with_ones(heads: Tensor, matrix: Matrix) -> Tensor:
    """Return the heads side by side, and a 1 that meets the bias."""
    return heads if matrix.b is None else torch.cat([heads, heads.new_ones(*heads.shape[:-1], 1)], -1)


def _sample(seen: ModuleBatch, name: str) -> Sample:
    if seen.call is None or seen.source is None:
        raise ValueError(
            f"the values of module {name!r} were not seen; name its modules as `headwise.nn.probe` does, or leave the "
            "values alone with value_steps=0"
        )
    return Sample(seen.call, seen.source, seen.target, seen.heads)


def _check_heads(layer: ValueSystem, W: Tensor, sample: Sample, name: str) -> None:
    """What we attend to is what the module makes of it: no norm of the values, no gate between."""
    expected = layer.heads(W, sample.call, sample.source)
    if not torch.allclose(expected, sample.heads, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
        raise ValueError(
            f"the output projection of module {name!r} takes other than its heads side by side (a gate or a norm "
            "stands between), so its values cannot be solved; leave them alone with value_steps=0"
        )

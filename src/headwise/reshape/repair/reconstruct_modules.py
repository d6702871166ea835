"""Reconstruct attention modules in closed form: solve their projections so that attention outputs what it did before.

Nothing is trained: attention is linear in W_O, and in the values' projection for a given W_O. W_O is solved by ridge
regression on calibration text, from sums in float64, and the values' projection after it. The query and key
projections do not change, so for the same inputs the attention weights stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...shapes.arguments import check_counts, check_functions, shown
from ..arguments import check_models, check_told
from .linear_matrix import Matrix
from .paired_models import Batch, ModuleBatch, Pair, Projections, batches_of, run_model
from .ridge import NormalEquations, best
from .value_solver import ValueSystem, solve_values

Inputs = Literal["original", "own"]


@dataclass(frozen=True)
class Reconstruction:
    """The result for one attention module.

    Attributes:
        module: Its name.
        before: The squared error of its output on held-out text, as a share of the output's squares.
        after: The same after the reconstruction.
        ridge: The ridge of the fit of W_O; None if no fit was better, so that W_O did not change.
        values: True if the values' projection was changed.
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
    """Solve the output projections of `changed` again, and then its value projections, in place.

    Args:
        changed: A model with fewer or other heads, with the module names of its original.
        original: The model whose attention outputs are the target.
        batches: Calibration text without padding, at least two batches: ids (B, T), or the keywords of a call.
        layers: The projections of each attention module, by its name.
        inputs: The inputs of the changed layers during the fit: the "original" model's hidden states, or their "own",
            layer after layer, with the errors of earlier layers.
        value_steps: Steps of conjugate gradients for the values of each layer; 0 leaves the values unchanged and, with
            "original" inputs, needs one pass over the text in place of one per layer.
        call: Runs a model on a batch.
        progress: Called as ``progress(done, total)`` after each batch of text.

    Returns:
        The result for each attention module, in the order in which they run.

    Raises:
        TypeError: a module that holds no matrix of its own.
        ValueError: unknown `inputs`, too few batches, or a module that a model lacks; an output projection that was not
            run, or whose input is not the concatenated heads; heads or outputs that are not finite.

    Example:
        >>> import headwise
        >>> original, changed = headwise.MultiHeadAttention(12, 3), headwise.MultiHeadAttention(12, 3)
        >>> batches = [torch.randn(2, 31, 12) for _ in range(3)]
        >>> [done] = reconstruct_modules(changed, original, batches, {"": Projections("o_proj", "v_proj")})
        >>> done.after < done.before
        True
    """
    check_models(changed=changed, original=original)
    if not isinstance(layers, Mapping) or not all(isinstance(where, Projections) for where in layers.values()):
        raise TypeError(f"layers are headwise.reshape.Projections by the name of a module; got {shown(layers)}")
    check_functions(call=call)
    check_told(progress=progress)
    if not isinstance(inputs, str) or inputs not in ("original", "own"):
        raise ValueError(f'inputs is "original" or "own"; got {shown(inputs)}')
    check_counts(value_steps=value_steps)
    run = _Reconstructor(Pair(changed, original, layers, inputs == "original", call), *batches_of(batches), progress)
    with run.pair.recording(calls=value_steps > 0):
        run.begin(passes=len(layers) if value_steps or inputs == "own" else 1)
        if run.passes == 1 and not value_steps:
            sums = run.sums(run.order)
            return [run.solve_output(name, *sums[name]) for name in run.order]
        if not value_steps:
            return [run.solve_output(name, *run.sums([name])[name]) for name in run.order]
        return [run.solve_both(name, value_steps) for name in run.order]


class _Reconstructor:
    """A reconstruction: both models with hooks, the batches to fit to, and the batches to check by."""

    def __init__(
        self, pair: Pair, fit: list[Batch], check: list[Batch], progress: Callable[[int, int], None] | None
    ) -> None:
        self.pair, self.fit, self.check, self.progress = pair, fit, check, progress
        self.order: list[str] = []
        self.passes = self.done = 0

    def begin(self, passes: int) -> None:
        """Run both models once, to check that all modules run, and to record their order."""
        self.passes = passes
        for name, seen in self.pair.read(self.fit[0]).items():
            output = self.pair.layers[name].output
            if seen.heads is None or seen.target is None:
                raise ValueError(f"module {output!r} was not run in both models; name modules that a batch runs")
            self.projection(output)
        self.order = list(self.pair.order)

    def read(self, batches: list[Batch], until: str | None) -> Iterator[dict[str, ModuleBatch]]:
        """Yield the record of the modules for each batch, and report progress."""
        for batch in batches:
            yield self.pair.read(batch, until)
            self.done += 1
            if self.progress is not None:
                self.progress(self.done, self.passes * (len(self.fit) + len(self.check)))

    def projection(self, where: str) -> Matrix:
        """Return the matrix of a projection of the changed model."""
        return Matrix.of(self.pair.changed.get_submodule(where), where)

    def sums(self, names: Sequence[str]) -> dict[str, tuple[NormalEquations, NormalEquations]]:
        """Return normal equations of the output projections: from the fit batches, and from the check batches."""
        until = names[-1] if len(names) == 1 else None
        matrices = {name: self.projection(self.pair.layers[name].output) for name in names}
        both = {name: (_empty(matrix), _empty(matrix)) for name, matrix in matrices.items()}
        for n, batches in enumerate((self.fit, self.check)):
            for seen in self.read(batches, until):
                for name, matrix in matrices.items():
                    both[name][n].add(_with_ones(seen[name].heads, matrix), seen[name].target)
        return both

    def solve_output(self, name: str, fit: NormalEquations, check: NormalEquations) -> Reconstruction:
        """Solve W_O and write it into the module."""
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
        """Solve W_O, then W_V for this W_O, then W_O again."""
        where = self.pair.layers[name]
        matrix = self.projection(where.output)
        samples: list[list[ModuleBatch]] = []
        sums = _empty(matrix), _empty(matrix)
        for n, batches in enumerate((self.fit, self.check)):
            samples.append([])
            for seen in self.read(batches, name):
                sums[n].add(_with_ones(seen[name].heads, matrix), seen[name].target)
                if where.value is not None:
                    _check_seen(seen[name], name)
                    samples[n].append(seen[name])
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
    """Return the matrix in float64, with its bias as the last row."""
    parts = [matrix.W] if matrix.b is None else [matrix.W, matrix.b[None]]
    return torch.cat(parts).to(torch.float64)


def _empty(matrix: Matrix) -> NormalEquations:
    n, m = matrix.W.shape
    return NormalEquations(n + (matrix.b is not None), m, matrix.W.device)


def _with_ones(heads: Tensor, matrix: Matrix) -> Tensor:
    """Return the concatenated heads, with a 1 appended for the bias."""
    return heads if matrix.b is None else torch.cat([heads, heads.new_ones(*heads.shape[:-1], 1)], -1)


def _check_seen(seen: ModuleBatch, name: str) -> None:
    if seen.call is None or seen.source is None:
        raise ValueError(
            f"the values of module {name!r} were not seen; name its modules as `headwise.nn.probe` does, or leave the "
            "values alone with value_steps=0"
        )


def _check_heads(layer: ValueSystem, W: Tensor, sample: ModuleBatch, name: str) -> None:
    """Raise ValueError unless attention with these values gives the input of W_O, without a norm or gate between."""
    expected = layer.heads(W, sample.call, sample.source)
    if not torch.allclose(expected, sample.heads, rtol=1e-2, atol=1e-2 * float(expected.abs().max())):
        raise ValueError(
            f"the output projection of module {name!r} takes other than its heads side by side (a gate or a norm "
            "stands between), so its values cannot be solved; leave them alone with value_steps=0"
        )

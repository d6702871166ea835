"""Decode with fast linear layers: a step of a few tokens runs a model's projections in the native kernel."""

from __future__ import annotations

from types import TracebackType

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import tqdm

from ...cache.huge_pages import collapse, huge_parts
from ...nn.decode.fast_linear import DTYPES, FastLinear
from ...ops.native import library as native_library
from ..errors import ModelError


def fast_decode(model: nn.Module) -> FastDecode:
    """Run the linear layers of a model in the native kernel wherever at most eight rows pass through them.

    A decode step reads every weight once, so its time is that of reading; the kernel reads faster than PyTorch's
    matrix products with one row, and with two to eight rows several times as fast. Everything else stays as it is:
    prompts, training, autocast and compiled calls use `torch.nn.Linear`; forward hooks and LoRA adapters run; weights,
    state dict and saved files do not change. Quantized layers, parametrizations and other subclasses are left alone.

    Linux (6.1 or newer) moves the weights to pages of 2 MiB, in place; that takes half a second per GB, once, and makes
    reading them faster. It stays so afterwards.

    Args:
        model: any module on the CPU, for instance a transformers model or `headwise.MultiHeadAttention`.

    Returns:
        What was taken and what was left. As a context manager it ends with the block; else call its `remove`.

    Raises:
        ModelError: there is no native kernel, or the model has no linear layer that the kernel takes.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=24, intermediate_size=29, num_attention_heads=3, num_hidden_layers=1, vocab_size=31)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    >>> with fast_decode(model) as fast:
    ...     text = model.generate(torch.tensor([[2, 3]]), max_new_tokens=3, do_sample=False)
    >>> fast
    FastDecode(8 linear layers, 0 left as they are)
    """
    if (problem := native_library.error_for()) is not None:
        raise ModelError(f"fast_decode needs the native kernel: {problem}; without it the model runs as it is")
    found, left = _sort(model)
    if not found:
        why = f"; {_first(left)}" if left else ""
        raise ModelError(f"fast_decode found no torch.nn.Linear on the CPU in float32, bfloat16 or float16{why}")
    _move_to_huge_pages([layer.weight for layer in found.values()])
    for layer in found.values():
        layer.__class__ = FastLinear
    return FastDecode(found, left)


class FastDecode:
    """The linear layers that `fast_decode` took.

    Attributes:
        taken: the names of the layers that run in the native kernel.
        left: the names of all other layers that hold a matrix product, each with the reason.
    """

    def __init__(self, layers: dict[str, nn.Linear], left: dict[str, str]) -> None:
        self.taken = tuple(layers)
        self.left = left
        self._layers = layers

    def remove(self) -> None:
        """Make the layers `torch.nn.Linear` again."""
        for layer in self._layers.values():
            if type(layer) is FastLinear:
                layer.__class__ = nn.Linear  # type: ignore[assignment]
        self._layers = {}

    def __enter__(self) -> FastDecode:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"FastDecode({len(self.taken)} linear layers, {len(self.left)} left as they are)"


def _sort(model: nn.Module) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Return the layers to take, and the reason for each other layer with a matrix product."""
    found: dict[str, nn.Linear] = {}
    left: dict[str, str] = {}
    for name, layer in model.named_modules():
        if type(layer) is FastLinear:
            left[name] = "another fast_decode has it"
        elif type(layer) is nn.Linear:
            reason = _reason(layer)
            if reason is None:
                found[name] = layer
            else:
                left[name] = reason
        elif isinstance(layer, nn.Linear | Conv1D):
            left[name] = f"its class is {type(layer).__name__}, not torch.nn.Linear"
    return found, left


def _move_to_huge_pages(weights: list[Tensor]) -> None:
    """Move the memory of weights to huge pages, until the system refuses; a bar is shown from two seconds on."""
    for start, end in tqdm(huge_parts(weights), desc="Moving weights to huge pages", delay=2, leave=False):
        if not collapse(start, end):
            return


def _reason(layer: nn.Linear) -> str | None:
    weight = layer.weight
    if "forward" in vars(layer):
        return "its forward was replaced"
    if type(weight) is not nn.Parameter:
        return f"its weight is a {type(weight).__name__}"
    if weight.device.type != "cpu":
        return f"its weight is on {weight.device}"
    return None if weight.dtype in DTYPES else f"its weight has {weight.dtype}"


def _first(left: dict[str, str]) -> str:
    name, reason = next(iter(left.items()))
    return f"{name or 'the model'}: {reason}" + (f" (and {len(left) - 1} more)" if len(left) > 1 else "")

"""One architecture: built, run under eager and under headwise, compared."""

from __future__ import annotations

import copy
import inspect
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hf_table_build import build, build_like, special
from hf_table_inputs import STEPS, Arguments, inputs, padded
from torch import Tensor
from transformers import PreTrainedModel

from headwise.hf import returned
from headwise.hf.errors import ModelError
from headwise.hf.models.architectures import CACHE
from headwise.hf.models.support import attention_modules, unseen_modules

Outputs = dict[str, Tensor]
Row = dict[str, Any]
Way = Callable[[PreTrainedModel], Outputs]
MOVED = 2e-5
"""What half of a head must move an output by, as a part of it, or a comparison would prove nothing."""
EQUAL, GRADIENTS = 1e-5, 1e-4
"""Of the largest number of an output, as in tests/hf/test_hf_models.py, and of a parameter's gradient; beyond it see
`rounding`."""


def flat(output: Any, name: str = "") -> Outputs:
    """The float tensors of an output by name, without caches."""
    if isinstance(output, Tensor):
        return {name: output} if output.is_floating_point() and output.numel() else {}
    if isinstance(output, dict):
        items = [(k, v) for k, v in output.items() if not re.search("past_key_values|cache|attentions", str(k))]
    elif isinstance(output, list | tuple):
        items = list(enumerate(output))
    else:
        return {}
    return {k: x for key, value in items for k, x in flat(value, f"{name}.{key}" if name else str(key)).items()}


def real(outputs: Outputs, arguments: Arguments) -> Outputs:
    """The outputs at tokens that are not padding."""
    masks = [
        x.bool() for k, x in arguments.items() if k.endswith("attention_mask") and isinstance(x, Tensor) and x.ndim == 2
    ]
    kept = {}
    for name, x in outputs.items():
        fits = [m for m in masks if x.ndim > 2 and x.shape[:2] == m.shape]
        kept[name] = x[fits[0]] if fits else x
    return kept


def run(model: PreTrainedModel, arguments: Arguments, **more: Any) -> tuple[Any, Outputs]:
    torch.manual_seed(11)  # models that draw: the same numbers
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    cast = {k: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in arguments.items()}
    output = model(**cast, **more)
    return output, real(flat(output), arguments)


def apart(ours: Outputs, eager: Outputs) -> float:
    """The largest difference, as a part of the largest number of its output."""
    if ours.keys() != eager.keys():
        raise ValueError(f"outputs {sorted(ours)} and {sorted(eager)}")
    worst = 0.0
    for name, b in eager.items():
        a = ours[name]
        if a.shape != b.shape:
            raise ValueError(f"{name}: {tuple(a.shape)} and {tuple(b.shape)}")
        same = torch.isfinite(a) == torch.isfinite(b)
        a, b = (torch.nan_to_num(x.detach().double(), 0.0, 0.0, 0.0) for x in (a, b))
        difference = (a - b).abs().max() / b.abs().max().clamp(min=1e-30)
        worst = max(worst, float(difference) if bool(same.all()) else float("inf"))
    return worst


def steps(model: PreTrainedModel, arguments: Arguments) -> Outputs:
    """A forward that fills a cache, then a step and a chunk that read it."""
    text = "decoder_input_ids" if "decoder_input_ids" in arguments else "input_ids"
    ids = arguments[text]
    more = torch.randint(3, 90, (len(ids), sum(STEPS)), generator=torch.Generator().manual_seed(5))
    output, outputs = run(model, arguments, use_cache=True)
    whole = {f"0.{k}": x for k, x in outputs.items()}
    past = output[CACHE]
    at = 0
    for n, length in enumerate(STEPS, 1):
        step: Arguments = {text: more[:, at : at + length], CACHE: past}
        at += length
        if text == "decoder_input_ids" and "encoder_outputs" in inspect.signature(model.forward).parameters:
            step["encoder_outputs"] = (output.encoder_last_hidden_state,)
            if "attention_mask" in arguments:
                step["attention_mask"] = arguments["attention_mask"]
        elif "attention_mask" in arguments:
            step["attention_mask"] = torch.cat(
                [arguments["attention_mask"], torch.ones(len(ids), at, dtype=torch.long)], 1
            )
        next_output, outputs = run(model, step, use_cache=True)
        whole |= {f"{n}.{k}": x for k, x in outputs.items() if not k.startswith("encoder")}
        past = next_output[CACHE]
    return whole


def gradients(model: PreTrainedModel, arguments: Arguments) -> Outputs:
    """Of every parameter, from the outputs weighed by noise; empty where nothing can be derived."""
    noise = torch.Generator().manual_seed(13)
    model.zero_grad()
    with torch.enable_grad():
        tensors = [x for x in run(model, arguments)[1].values() if x.requires_grad]
        if not tensors:
            return {}
        loss = sum((x * torch.randn(x.shape, generator=noise, dtype=x.dtype)).sum() / x.numel() for x in tensors)
        loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    largest = max((float(g.abs().max()) for g in grads.values()), default=0.0)
    # A gradient that is zero in exact arithmetic (a bias of keys) is rounding alone: such are measured by the largest.
    return {"": torch.cat([g.flatten() / max(float(g.abs().max()), 1e-3 * largest, 1e-30) for g in grads.values()])}


@contextmanager
def calls(gate: bool = False) -> Iterator[list[int]]:
    """The heads of the attention calls that reach headwise; `gate`: with half of their first head."""
    seen: list[int] = []
    exact = returned.attention

    def spy(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(query.shape[1])
        if gate:
            kwargs["gate"] = torch.tensor([0.5] + [1.0] * (query.shape[1] - 1), dtype=query.dtype)
        return exact(query, *args, **kwargs)

    with mock.patch.object(returned, "attention", spy):
        yield seen


def ways(model: PreTrainedModel, arguments: Arguments) -> dict[str, Way]:
    """What is compared: name -> a function of the model."""
    parameters = inspect.signature(model.forward).parameters
    several: dict[str, Way] = {"plain": lambda m: run(m, arguments)[1]}
    text = "input_ids" in arguments and "attention_mask" in parameters
    causal = "input_ids" in arguments and CACHE in parameters and "decoder_input_ids" not in arguments
    if text:
        several["right"] = lambda m: run(m, padded(m, arguments, "right"))[1]
    if text and causal:
        several["left"] = lambda m: run(m, padded(m, arguments, "left"))[1]
    if CACHE in parameters and ("input_ids" in arguments or "decoder_input_ids" in arguments):
        first = padded(model, arguments, "left") if text and causal else arguments
        several["cached"] = lambda m: steps(m, first)
    last = padded(model, arguments, "left" if causal else "right") if text else arguments
    several["gradient"] = lambda m: gradients(m, last)
    return several


def measure(name: str) -> Row:
    """The row of one architecture."""
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = {"name": name} | outcome(name)
    return row | {"seconds": round(time.perf_counter() - begun, 2)}


def outcome(name: str) -> Row:
    """Built, run under eager, then under headwise as far as that goes."""
    if "left" in special(name):
        return {"outcome": "left", "reason": special(name)["left"]}
    try:
        model = reference_of(build(name), special(name).get("reference", "eager"))
    except Exception as error:
        return failed("not built", error)
    row: Row = {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}
    try:
        arguments = inputs(model, name)
        with torch.no_grad():
            theirs = run(model, arguments)[1]
    except Exception as error:
        return row | failed("not run", error)
    row["inputs"] = {k: list(x.shape) if isinstance(x, Tensor) else str(x) for k, x in arguments.items()}
    if not theirs or not all(torch.isfinite(x).any() for x in theirs.values()):
        return row | {"outcome": "not run", "reason": "eager gives no finite numbers"}
    ours, refusal = on_headwise(name, model, arguments)
    if ours is None:
        return row | refusal
    return row | refusal | compared(model, ours, arguments, theirs)


def reference_of(model: PreTrainedModel, implementation: str) -> PreTrainedModel:
    """The model on an implementation of transformers; some classes (Falcon) choose it when they are built."""
    if implementation != "eager":
        with suppress(ValueError):  # some have it in parts alone, and those are switched below
            made = type(model)._from_config(copy.deepcopy(model.config), attn_implementation=implementation)
            made.load_state_dict(model.state_dict())
            model = made.eval()
    model.set_attn_implementation(implementation)
    return model


def on_headwise(name: str, model: PreTrainedModel, arguments: Arguments) -> tuple[PreTrainedModel | None, Row]:
    """The same model on headwise; where it is refused when built, switched, if parts of it then run on headwise."""
    try:
        return build_like(model, name), {}
    except ModelError as error:
        has_attention = bool(unseen_modules(model) or attention_modules(model))
        refusal: Row = {"reason": said(error), "own": has_attention}
    except Exception as error:
        return None, failed("broken", error)
    ours = copy.deepcopy(model)
    with calls() as seen, suppress(Exception), torch.no_grad():
        ours.set_attn_implementation("headwise")
        run(ours, arguments)
    return (ours, refusal | {"switched": True}) if seen else (None, refusal | {"outcome": "refused"})


def compared(model: PreTrainedModel, ours: PreTrainedModel, arguments: Arguments, theirs: Outputs) -> Row:
    """How far headwise is from eager in every way that the model has."""
    try:
        with torch.no_grad(), calls() as seen:
            run(ours, arguments)
    except Exception as error:
        if isinstance(error, ModelError) or (isinstance(error, ValueError) and "headwise" in str(error)):
            return {"outcome": "refused", "reason": said(error), "own": True}
        return failed("broken", error)
    row: Row = {"calls": len(seen), "modules": len(attention_modules(model)), "unseen": len(unseen_modules(model))}
    if not seen:
        return row | {"outcome": "not reached", "reason": "its inputs here reach no attention on the interface"}
    with torch.no_grad(), calls(gate=True):
        row["moved"] = apart(run(ours, arguments)[1], theirs)
    if row["moved"] < MOVED:
        return row | {"outcome": "not reached", "reason": "its outputs do not depend on its heads"}
    errors: dict[str, float] = {}
    for way, function in ways(model, arguments).items():
        try:
            eager = measured(function, model, way)
        except Exception as error:  # this way is none of the model's: eager itself fails
            row.setdefault("without", {})[way] = said(error)
            continue
        if eager and (way != "gradient" or torch.isfinite(eager[""]).all()):
            try:
                errors[way] = apart(measured(function, ours, way), eager)
            except Exception as error:
                return row | failed("broken", error, f"{way}: ")
    worse = [way for way, x in errors.items() if not x <= limit(way)]
    row |= {"differences": errors, "rounding": {way: rounding(model, ours, arguments, way) for way in worse}}
    return row | {"outcome": "equal" if all(row["rounding"].values()) else "differs"}


def limit(way: str) -> float:
    return GRADIENTS if way == "gradient" else EQUAL


def measured(function: Way, model: PreTrainedModel, way: str) -> Outputs:
    with torch.set_grad_enabled(way == "gradient"):
        return function(model)


def rounding(model: PreTrainedModel, ours: PreTrainedModel, arguments: Arguments, way: str) -> bool:
    """Whether a difference is rounding that the model itself makes large.

    Then in float64 both agree, and in float32 headwise is as far from that as eager is itself, in one way or another.
    """
    several = ways(model, arguments)
    exact = {name: measured(several[name], copy.deepcopy(model).double(), name) for name in {"plain", way}}
    theirs = max(apart(measured(several[name], model, name), x) for name, x in exact.items())
    agree = apart(measured(several[way], copy.deepcopy(ours).double(), way), exact[way]) <= limit(way)
    return agree and apart(measured(several[way], ours, way), exact[way]) <= 2 * theirs + limit(way)


def failed(outcome: str, error: BaseException, way: str = "") -> Row:
    frames = traceback.extract_tb(error.__traceback__)[:-5:-1]
    return {
        "outcome": outcome,
        "reason": way + said(error),
        "at": " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames),
    }


def said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])}"[:300]

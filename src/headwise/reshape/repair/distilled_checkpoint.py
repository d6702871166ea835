"""Write a distilled checkpoint: the student's weights under the names of its folder, with the loss curve as a plot."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import nn

from ...shapes.arguments import check_texts, shown
from ..arguments import check_kind, check_models, check_writing
from ..layout.protocol import ReshapableCheckpoint, check_source
from ..pruning.budget import bytes_of
from ..write.readme import proved
from ..write.verify import PLAIN, Proof, planned
from ..write.writer import Planned, write
from .distill import DistillConfig, LossCurve

CURVE, PICTURE = "distill.json", "distill.png"


def distilled_tensors(source: ReshapableCheckpoint, student: nn.Module) -> list[Planned]:
    """Return the student's weights, with the name and dtype of each tensor of its checkpoint.

    Raises:
        ValueError: the student lacks a tensor of the checkpoint, or has it in another shape.
    """
    state = student.state_dict()
    base = getattr(student, "base_model_prefix", "")
    made = []
    for name, entry in source.tensors.items():
        known = [state[other] for other in (name, f"{base}.{name}", name.removeprefix(f"{base}.")) if other in state]
        if not known or tuple(known[0].shape) != tuple(entry.shape):
            raise ValueError(f"the student has no {name!r} of shape {tuple(entry.shape)}; load it from that folder")
        make = partial(known[0].detach().to, "cpu", entry.dtype)
        made.append(Planned(name, entry.dtype, tuple(entry.shape), make))
    return made


def distill_facts(
    source: ReshapableCheckpoint, teacher: str, config: DistillConfig, curve: LossCurve, context: int = 8192
) -> dict[str, Any]:
    """Return the facts of a distillation as plain data, for JSON and RESHAPE.md.

    Args:
        source: The student's checkpoint, as `headwise.hf.checkpoint` opens it.
        teacher: Name of the teacher in the text.
        config: The config that `distill` was given.
        curve: The losses that `distill` returned.
        context: Tokens of the cache that is counted.

    Raises TypeError for arguments of another type.
    """
    check_source(source)
    check_texts(teacher=teacher)
    check_kind(DistillConfig, "headwise.reshape.DistillConfig", config=config)
    check_kind(LossCurve, "distill", curve=curve)
    model_type, size = source.config.get("model_type"), bytes_of(source.tensors.values())
    plan = planned(source.config, context)
    points = [(str(step), f"{far:.4f}", f"{loss:.4f}") for step, far, loss in curve.held]
    tokens = config.steps * config.rows * config.length
    return {
        "done": "Distilled",
        "notes": [
            f"trained for {config.steps} steps of {config.rows} x {config.length} tokens ({tokens:,} in all) to say "
            f"what {teacher} says"
        ],
        "gone": {},
        "tables": [(("step", "divergence from the teacher (nats/token)", "loss (nats/token)"), points)],
        "recipe": asdict(config),
        "curve": asdict(curve),
        "counts": {},
        "model_type": [model_type, model_type],
        "weight_bytes": [size, size],
        "context": context,
        "plan": [plan, plan],
    }


def write_distilled(
    source: ReshapableCheckpoint,
    student: nn.Module,
    destination: str | os.PathLike[str],
    facts: dict[str, Any],
    *,
    proof: Proof | None = PLAIN,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Write the distilled checkpoint with its loss curve as JSON and as a plot; after an error no folder is left.

    Args:
        source: The checkpoint that the student was loaded from.
        student: The distilled model.
        destination: The folder to write; it must not exist.
        facts: The result of `distill_facts`; the proof is added.
        proof: Settings of the proof that the result loads; None for no proof.
        progress: Called with the bytes done and the total bytes.

    Returns:
        `facts`, with the proof.

    Raises:
        TypeError, ValueError, OSError: in one line, what is wrong; then nothing has been written.
    """
    check_source(source)
    check_models(student=student)
    check_writing(destination, proof, progress=progress)
    if not isinstance(facts, dict) or not {"curve", "recipe", "notes"} <= facts.keys():
        raise TypeError(f"facts are what distill_facts tells; got {shown(facts)}")
    extra = {CURVE: (json.dumps({"recipe": facts["recipe"], **facts["curve"]}, indent=1) + "\n").encode()}
    picture = picture_of(LossCurve(**facts["curve"]))
    if picture is None:
        facts["notes"].append("there is no picture of the curve, which matplotlib draws: pip install 'headwise[look]'")
    else:
        extra[PICTURE] = picture
    write(
        destination,
        config=source.config,
        tensors=distilled_tensors(source, student),
        source=source,
        extra=extra,
        check=proved(facts, source, proof),
        progress=progress,
    )
    return facts


def picture_of(curve: LossCurve) -> bytes | None:
    """Return a plot of the losses as PNG; None if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(range(1, len(curve.steps) + 1), curve.steps, color="#9aa5d9", linewidth=1, label="each step's batch")
    if curve.held:
        steps, far, loss = zip(*curve.held, strict=True)
        axes.plot(steps, far, color="#4053d3", marker="o", label="text not trained on")
        other = axes.twinx()
        other.plot(steps, loss, color="#b51d14", marker="s", linestyle="--", label="loss on that text (right)")
        other.set_ylabel("loss (nats/token)")
        other.legend(loc="upper right")
    axes.set_xlabel("step")
    axes.set_ylabel("divergence from the teacher (nats/token)")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper center")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()

"""Prove that a written checkpoint is correct: a fresh process loads it, compares outputs, counts and measures speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...plan.result import of
from ...shapes.arguments import check_counts, check_flags, is_finite, whole_numbers

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Proof:
    """Settings of the proof: a fresh process loads the checkpoint with unmodified transformers and compares outputs.

    Attributes:
        ids: Tokens of a text, for the loss before and after; if empty, random ones are read.
        mask_id: The id of the mask token, for a model that was trained with one.
        speed: True to measure the speed before and after.

    Raises:
        TypeError, ValueError: ids that are not ints, or a `mask_id` below 0.

    Example:
        >>> from headwise import reshape
        >>> reshape.Proof(ids=[5, 3, 8], speed=False)
        Proof(ids=(5, 3, 8), mask_id=None, speed=False)
    """

    ids: tuple[int, ...] = ()
    mask_id: int | None = None
    speed: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(whole_numbers("ids", self.ids)))
        check_flags(speed=self.speed)
        if self.mask_id is not None:
            check_counts(0, mask_id=self.mask_id)

    def request(self, gates: list[list[int]] | None, *, same: bool = True) -> dict[str, Any]:
        """Return the request for the process; with `same=False` outputs may differ, and the losses show by how much."""
        check_flags(same=same)
        request = {"ids": list(self.ids) or None, "mask_id": self.mask_id, "speed": self.speed, "gates": gates}
        return request if same else {**request, "same": False}


PLAIN = Proof()


def require(answer: Mapping[str, Any]) -> None:
    """Raise ValueError unless the result loads completely and computes the same as the original with gated heads."""
    for kind in ("missing", "unexpected"):
        if answer[kind]:
            raise ValueError(
                f"the result is not what {answer['class']} loads: {len(answer[kind])} {kind} tensors, "
                f"{answer[kind][0]!r} first, so nothing was written; please report this"
            )
    if answer.get("tokenizer") is False:
        raise ValueError(
            f"under {answer['class']} transformers makes other ids of a text than before, so nothing was written; keep "
            "a number of heads that the model's own class loads, or add zero=True"
        )
    if not is_finite(answer.get("largest", 0.0)):
        raise ValueError(
            "the original's outputs with those heads switched off are not finite, so no result can be compared with "
            "them and nothing was written; get the checkpoint anew, or --no-verify writes the result unproved"
        )
    allowed = TOLERANCE * max(1.0, answer.get("largest", 0.0))
    if not answer.get("difference", 0.0) <= allowed:
        raise ValueError(
            f"the result differs from the original with those heads switched off by {answer['difference']:.3g}, and "
            f"{allowed:.3g} is allowed, so nothing was written; --no-verify writes it unproved"
        )


def planned(config: Mapping[str, Any], context: int) -> dict[str, Any] | None:
    """Return parameters and cache bytes as `headwise.plan` counts them; None if it cannot count them exactly."""
    check_counts(context=context)
    try:
        plan = of(dict(config), context=max(context, 1), kv_dtype="fp32")
    except ValueError:
        return None
    if not plan.exact:
        return None
    return {"parameters": plan.parameters()["total"], "cache_bytes": plan.contexts[0].cache_bytes}

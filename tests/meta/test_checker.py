"""The shape checker that all other tests run under: what it refuses, and that it can be switched off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import checker
import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

import headwise
from headwise.ops.masks.mask import Mask


@checker.checked
def shapes(a: Float[Tensor, "N M"], /, b: Float[Tensor, " M"], *, c: int = 0, **rest: str) -> Float[Tensor, " N"]:
    return (a @ b)[c:]


@checker.checked
def types(a: int, *rest: int, b: Missing | None = None) -> str:  # type: ignore[name-defined]  # noqa: F821
    return "b" if a else None  # type: ignore[return-value]


@checker.checked
def numbers(n: int) -> Iterator[int]:
    yield from range(n)


@checker.checked
@dataclass(frozen=True)
class Pair:
    left: Float[Tensor, " N"]
    right: Float[Tensor, " N"]


WRONG = {
    "letters of two arguments": lambda: shapes(torch.ones(2, 3), torch.ones(2)),
    "letters of the result": lambda: shapes(torch.ones(2, 3), torch.ones(3), c=1),
    "a dtype": lambda: shapes(torch.ones(2, 3, dtype=torch.int64), torch.ones(3)),
    "a keyword": lambda: shapes(torch.ones(2, 3), torch.ones(3), c=0.0),  # type: ignore[arg-type]
    "any keyword": lambda: shapes(torch.ones(2, 3), torch.ones(3), d=1),  # type: ignore[arg-type]
    "a type": lambda: types("a"),  # type: ignore[arg-type]
    "one of several": lambda: types(1, "a"),  # type: ignore[arg-type]
    "a result": lambda: types(0),
    "an argument of a generator": lambda: numbers(1.5),  # type: ignore[arg-type]
    "fields of a dataclass": lambda: Pair(torch.ones(2), torch.ones(3)),
    "a shape of headwise": lambda: headwise.nn.Rotary(8)(torch.ones(3), torch.ones(3)),
    "a type of headwise": lambda: Mask(3),  # type: ignore[arg-type]
}


@pytest.mark.checked
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_refused(what: str, shape_checker: bool) -> None:
    if not shape_checker:
        pytest.skip("HEADWISE_UNCHECKED is set")
    with pytest.raises(TypeCheckError):
        WRONG[what]()


@pytest.mark.unchecked
@pytest.mark.parametrize("what", WRONG)
def test_switched_off_nothing_is_refused(what: str) -> None:
    try:
        WRONG[what]()
    except Exception as error:
        assert not isinstance(error, TypeCheckError)


@pytest.mark.checked
def test_what_is_right_passes() -> None:
    assert shapes(torch.ones(2, 3), torch.ones(3), d="any").tolist() == [3, 3]
    assert types(1, 2, b=object()) == "b" and list(numbers(3)) == [0, 1, 2]
    assert shapes(torch.ones(5, 7), torch.ones(7)).shape == (5,), "a letter keeps its size for one call alone"
    assert Pair(torch.ones(2), torch.ones(2)).right.shape == (2,)


def test_a_function_that_says_nothing_is_left_as_it_is() -> None:
    def plain(a, b=2):  # type: ignore[no-untyped-def]
        return a

    assert checker.checked(plain) is plain

"""Combination of rules: all of them, any of them, or the complement, simplified in easy cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from typing_extensions import override

from .indexing import Region, RowIndex, Span
from .rule import Rule
from .rules import Band, Lengths

NOTHING = Lengths(0)
"""The rule that allows no key."""


@dataclass(frozen=True, eq=False)
class _Joined(Rule):
    """Several rules as one; none of them is a bias."""

    rules: tuple[Rule, ...]

    def _join(self, places: Sequence[Tensor]) -> Tensor:
        raise NotImplementedError

    @override
    def at(self, i: Tensor, j: Tensor, T: int, S: int) -> Tensor:
        return self._join([rule.at(i, j, T, S) for rule in self.rules])

    @override
    def grid(self, T: int, S: int, rows: RowIndex, cols: RowIndex, device: torch.device | None) -> Tensor:
        return self._join([rule.grid(T, S, rows, cols, device) for rule in self.rules])

    @override
    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        for rule in self.rules:
            rule.check(B, H, T, S, device)

    @override
    def part(self, region: Region, T: int, S: int) -> Rule:
        return type(self)(tuple(rule.part(region, T, S) for rule in self.rules))

    @override
    def placed(self, offset: int | Tensor) -> Rule:
        return type(self)(tuple(rule.placed(offset) for rule in self.rules))

    @override
    def sized(self, B: int, H: int) -> Rule:
        rules = tuple(rule.sized(B, H) for rule in self.rules)
        if all(a is b for a, b in zip(rules, self.rules, strict=True)):
            return self
        known = self.__dict__.setdefault("_sized", {})  # one object per size, because it caches its tile map
        return known.setdefault((B, H), type(self)(rules))

    @property
    @override
    def is_same_for_rows(self) -> bool:
        return all(rule.is_same_for_rows for rule in self.rules)


@dataclass(frozen=True, eq=False)
class AllOf(_Joined):
    """The intersection of rules: a key is allowed if every rule allows it."""

    @override
    def _join(self, places: Sequence[Tensor]) -> Tensor:
        return reduce(torch.logical_and, places)

    @override
    def reach(self, first: int, last: int, T: int, S: int) -> tuple[int, int]:
        ends = [rule.reach(first, last, T, S) for rule in self.rules]
        return max(k0 for k0, _ in ends), min(k1 for _, k1 in ends)

    @override
    def meets(self, rows: Span, cols: Span, T: int, S: int) -> bool:
        return all(rule.meets(rows, cols, T, S) for rule in self.rules)


@dataclass(frozen=True, eq=False)
class AnyOf(_Joined):
    """The union of rules: a key is allowed if at least one rule allows it."""

    @override
    def _join(self, places: Sequence[Tensor]) -> Tensor:
        return reduce(torch.logical_or, places)

    @override
    def reach(self, first: int, last: int, T: int, S: int) -> tuple[int, int]:
        ends = [rule.reach(first, last, T, S) for rule in self.rules]
        return min(k0 for k0, _ in ends), max(k1 for _, k1 in ends)

    @override
    def meets(self, rows: Span, cols: Span, T: int, S: int) -> bool:
        return any(rule.meets(rows, cols, T, S) for rule in self.rules)


@dataclass(frozen=True, eq=False)
class Not(_Joined):
    """The complement of one rule: a key is allowed if the rule forbids it."""

    @override
    def _join(self, places: Sequence[Tensor]) -> Tensor:
        return ~places[0]


def both(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return rules that all apply, without redundant ones.

    Bands with the same offset become one band; if one rule allows no key, the other restricting rules are dropped.
    """
    if any(rule is NOTHING for rule in rules):
        return (NOTHING, *(rule for rule in rules if rule.biases))
    out: list[Rule] = []
    for rule in rules:
        if any(rule is other and not rule.biases for other in out):
            continue
        joined = None
        if isinstance(rule, Band):
            for n, other in enumerate(out):
                if isinstance(other, Band) and (joined := other & rule) is not None:
                    out[n] = joined
                    break
        if joined is None:
            out.append(rule)
    return tuple(out)


def either(one: tuple[Rule, ...], other: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return the union of two lists of rules, each of which applies as a whole; an empty list allows every key."""
    if not one or not other:
        return ()
    terms: list[Rule] = []
    for rules in (one, other):
        rule = rules[0] if len(rules) == 1 else AllOf(rules)
        for term in rule.rules if isinstance(rule, AnyOf) else (rule,):
            if term is not NOTHING and not any(term is known for known in terms):
                terms.append(term)
    if not terms:
        return (NOTHING,)
    if len(terms) > 1:
        return (AnyOf(tuple(terms)),)
    return terms[0].rules if isinstance(terms[0], AllOf) else (terms[0],)


def neither(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return the complement of rules that apply together."""
    if not rules:
        return (NOTHING,)
    if len(rules) > 1:
        return (Not((AllOf(rules),)),)
    [rule] = rules
    if rule is NOTHING:
        return ()
    if isinstance(rule, Not):
        inner = rule.rules[0]
        return inner.rules if isinstance(inner, AllOf) else (inner,)
    band = ~rule if isinstance(rule, Band) else None
    return (Not((rule,)),) if band is None else (band,)

"""Conversion of quantities from and to text: 3.35TB/s, 990TF, 10.4 GiB."""

from __future__ import annotations

import math
import re

from .shape import short

_NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?(?:e[+-]?\d{1,2})?)\s*([KMGTPE]?)(i?)\s*(.*?)\s*", re.IGNORECASE)
_UNITS = {"bandwidth": ("", "b/s", "bps"), "flops": ("", "f", "flop", "flops", "flop/s", "flops/s", "f/s")}
_LEAST_BARE = 1e6
"""The least value of a text without a unit; below it the unit was probably forgotten."""


class _Bits(ValueError):
    """The error for a speed in bits, which would be eight times too fast if read as bytes."""


def rate(text: str | float, what: str) -> float:
    """Return a speed in bytes or FLOPs per second; `what` is ``bandwidth`` or ``flops``, also in the error message.

    Example:
        >>> rate("3.35TB/s", "bandwidth"), rate("990TF", "flops"), rate("2GiB/s", "bandwidth")
        (3350000000000.0, 990000000000000.0, 2147483648.0)

    Raises:
        ValueError: not a number between 1 and 1e100 (larger ones overflow later), another unit such as bits
            (``400Gb/s``), or a text without a unit such as ``3.35``.
    """
    example = {"bandwidth": "3.35TB/s", "flops": "990TF"}[what]
    wrong = ValueError(f"{what} is a number between 1 and 1e100 such as {example}; got {short(text)}")
    match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    if match is not None and what == "bandwidth" and match[4].startswith("b"):
        raise _Bits(f"{what} is in bytes (B) per second, and a small b means bits; got {short(text)}")
    if match is not None and match[4].lower() in _UNITS[what]:
        power = "KMGTPE".find(match[2].upper()) + 1 if match[2] else 0
        value = float(match[1]) * (1024**power if match[3] else 1000**power)
    elif isinstance(text, int | float) and not isinstance(text, bool) and abs(text) < 1e300:
        value = float(text)
    else:
        raise wrong
    if not 1 <= value <= 1e100:
        raise wrong
    if match is not None and not (match[2] or match[4]) and value < _LEAST_BARE:
        counted = {"bandwidth": "bytes", "flops": "FLOPs"}[what]
        raise ValueError(
            f"{what} has no unit and would be {value:,.6g} {counted} per second; add a unit, such as {example}; "
            f"got {short(text)}"
        )
    return value


_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def link(text: str) -> tuple[float, float]:
    """Return a link between ranks: bytes per second, and the seconds until a message arrives.

    Example:
        >>> link("50GB/s,2us")
        (50000000000.0, 2e-06)

    Raises:
        ValueError: not a bandwidth, a comma and a latency, each with its unit.
    """
    wrong = ValueError(f"link is a bandwidth and a latency such as 50GB/s,2us; got {short(text)}")
    words = text.split(",") if isinstance(text, str) else []
    time = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{0,9})?)\s*([mnuµ]?s)\s*", words[1]) if len(words) == 2 else None
    if time is None or not words[0].strip().lower().endswith(("b/s", "bps")):
        raise wrong
    try:
        return rate(words[0], "bandwidth"), float(time[1]) * _TIMES[time[2]]
    except _Bits:
        raise
    except ValueError:
        raise wrong from None


def show_seconds(seconds: float) -> str:
    """Return a time as text in the largest unit that gives a number of at least 1.

    Example:
        >>> show_seconds(0.00123), show_seconds(61), show_seconds(2e-7)
        ('1.23 ms', '61 s', '0.2 us')
    """
    rounded = float(f"{seconds:.3g}")  # 999.6 us are 1 ms
    unit, size = next((one for one in (("s", 1.0), ("ms", 1e-3)) if rounded >= one[1]), ("us", 1e-6))
    return f"{figures(seconds / size)} {unit}"


def figures(number: float, digits: int = 3) -> str:
    """Return a number as text with `digits` significant digits, without an exponent if it is large.

    Example:
        >>> figures(0.12345), figures(99.96), figures(1234.5, 4), figures(98765)
        ('0.123', '100', '1,234', '98,765')
    """
    return f"{number:,.0f}" if number >= 10 ** (digits - 1) else f"{number:.{digits}g}"


def show_bytes(count: float | int) -> str:
    """Return bytes as text in the largest binary unit that gives a number of at least 1.

    Example:
        >>> show_bytes(70272), show_bytes(512), show_bytes(10.41 * 2**30)
        ('68.6 KiB', '512 B', '10.4 GiB')
    """
    power = 0 if count < 1024 else min(6, int(math.log(count, 1024)))
    if round(count / 1024**power) == 1024 and power < 6:  # 1,023.7 KiB are 1 MiB
        power += 1
    scaled = count / 1024**power
    return f"{figures(scaled)} {'KMGTPE'[power - 1]}iB" if power else f"{scaled:,.0f} B"


def show(count: float | int, unit: str = "") -> str:
    """Return a number as text with a decimal prefix.

    Example:
        >>> show(8030261248), show(1.5e15, "FLOP"), show(12), show(999_600)
        ('8.03 G', '1.5 PFLOP', '12', '1 M')
    """
    rounded = float(f"{count:.3g}")
    power = 0 if rounded < 1000 else min(10, int(math.log10(rounded) / 3 + 1e-9))
    return f"{figures(rounded / 1000**power)} {' KMGTPEZYRQ'[power].strip()}{unit}".rstrip()


def contexts(text: str) -> tuple[int, ...]:
    """Return lengths in tokens from a text separated by commas; ``K`` is 1024.

    Example:
        >>> contexts("8192,128K")
        (8192, 131072)

    Raises:
        TypeError: not a text.
        ValueError: a part that is not a whole number.
    """
    if not isinstance(text, str):
        raise TypeError(f"context is a text such as 8192,131072; got {type(text).__name__}")
    lengths = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*(-?\d+)\s*([kK]?)\s*", word)
        if match is None:
            raise ValueError(f"context is whole numbers separated by commas, such as 8192,131072; got {text[:60]!r}")
        if len(match[1]) > 15:
            raise ValueError(f"context is at most 10,000,000,000 tokens; got {text[:60]!r}")
        lengths.append(int(match[1]) * (1024 if match[2] else 1))
    return tuple(lengths)

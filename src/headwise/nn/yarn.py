"""YaRN: rotary frequencies and score scale for contexts longer than in training.

Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models", arXiv 2309.00071.
"""

import math

from ..shapes.arguments import check_counts, check_numbers


def yarn_frequencies(
    rotary_dim: int,
    *,
    factor: float,
    original_length: int,
    base: float = 10000.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
) -> tuple[float, ...]:
    """Return the rotary frequencies for a context `factor` times longer, for ``Rotary(..., frequencies=...)``.

    A pair with more than `beta_fast` full rotations within the original length keeps its frequency; a pair with fewer
    than `beta_slow` has its frequency divided by `factor`. Between them, interpolation is linear in the pair index.

    Args:
        rotary_dim: Number of rotated components, even.
        factor: Ratio of the new context length to the original one, at least 1.
        original_length: Context length in training, in tokens (``original_max_position_embeddings``).
        base: As for `headwise.nn.Rotary` (``rope_theta``).
        beta_fast: Number of rotations above which a frequency stays unchanged.
        beta_slow: Number of rotations below which a frequency is divided by `factor`.

    Returns:
        Radians per position, ``rotary_dim / 2`` numbers, one for each pair.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an odd `rotary_dim`, a factor or length below 1, or a number that is not finite.

    Example:
        >>> slow = yarn_frequencies(64, factor=40, original_length=4096)
        >>> slow[0], round(slow[-1] / 10000 ** (-62 / 64), 6)
        (1.0, 0.025)
    """
    check_counts(0, 2**20, rotary_dim=rotary_dim)
    check_counts(original_length=original_length)
    check_numbers(factor=factor)
    check_numbers(1.0, base=base)
    check_numbers(0.0, beta_fast=beta_fast, beta_slow=beta_slow)
    if rotary_dim % 2 or rotary_dim < 2 or factor < 1 or original_length < 1:
        raise ValueError(
            "YaRN stretches the turns of rotary_dim / 2 pairs by factor >= 1 from original_length >= 1 tokens; got "
            f"rotary_dim {rotary_dim}, factor {factor}, original_length {original_length}"
        )

    def pair_of(turns: float) -> float:
        """Return the fractional index of the pair with this many rotations within the original length."""
        return rotary_dim * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_of(beta_fast)), 0)
    high = min(math.ceil(pair_of(beta_slow)), rotary_dim - 1)
    width = high - low or 0.001
    frequencies = []
    for pair in range(rotary_dim // 2):
        frequency = base ** (-2 * pair / rotary_dim)
        slowed = min(max((pair - low) / width, 0.0), 1.0)
        frequencies.append(frequency * (1 - slowed) + frequency / factor * slowed)
    return tuple(frequencies)


def yarn_scale(head_dim: int, *, factor: float, mscale: float = 1.0) -> float:
    """Return the scale of scores for a longer context: ``(1 + 0.1 mscale ln factor)^2 / sqrt(head_dim)``.

    Args:
        head_dim: Size of a whole query or key; for latent attention ``nope_dim + rope_dim``.
        factor: Ratio of the new context length to the original one; a factor of at most 1 changes nothing.
        mscale: ``mscale_all_dim`` of the config; if that is missing or 0, use 0, and the scale is ``head_dim ** -0.5``.

    Example:
        >>> round(yarn_scale(192, factor=40) * 192**0.5, 4)
        1.8739
    """
    check_counts(1, head_dim=head_dim)
    check_numbers(factor=factor, mscale=mscale)
    stretch = 1.0 if factor <= 1 else 1.0 + 0.1 * mscale * math.log(factor)
    return stretch * stretch * head_dim**-0.5

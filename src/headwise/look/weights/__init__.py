"""Read heads from the weights: composition of heads, attribution to tokens."""

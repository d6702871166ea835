"""Analysis of heads by their weights: composition of heads, and attribution to tokens."""

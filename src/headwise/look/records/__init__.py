"""Records of a look: scores, maps and evidence of each head, as plain data."""

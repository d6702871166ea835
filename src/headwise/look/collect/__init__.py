"""Forward passes over texts that collect the statistics of each head."""

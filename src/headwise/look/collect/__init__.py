"""Run a model over texts and collect the statistics of each head."""

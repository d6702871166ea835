"""Where a checkpoint keeps the weights of each head."""

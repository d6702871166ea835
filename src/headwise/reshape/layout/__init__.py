"""Layouts: where a checkpoint stores the weights of each head."""

"""Loading of models, tokenizers, processors and checkpoints, and verification of written checkpoints."""

"""Load models, tokenizers, processors and checkpoints, and verify what was written."""

"""The attention function and the masks that transformers calls."""

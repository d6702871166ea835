"""Run attention code that does not use transformers' attention interface."""

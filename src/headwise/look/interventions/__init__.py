"""Measure a model with heads switched off: ablation, importance, similarity of heads."""

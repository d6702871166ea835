"""Measurements with heads switched off: ablation, importance, similarity of heads."""

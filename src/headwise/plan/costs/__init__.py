"""Formulas for parameters, FLOPs and bytes."""

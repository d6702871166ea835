"""Modules: composition and state dicts; the arithmetic is in `headwise.ops`."""

from .probe import AttentionCall, Probe, probe

__all__ = ["AttentionCall", "Probe", "probe"]

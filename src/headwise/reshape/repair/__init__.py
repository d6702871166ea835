"""Recover the quality that a smaller model lost: in closed form, or by distillation."""

"""Bring back what a smaller model lost: in closed form, or by training."""

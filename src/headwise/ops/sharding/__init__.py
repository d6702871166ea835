"""Attention over inputs that are split over ranks."""

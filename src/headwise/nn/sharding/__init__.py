"""Attention modules whose heads or tokens are split over ranks."""

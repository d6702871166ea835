"""Attention modules whose heads are split over ranks."""

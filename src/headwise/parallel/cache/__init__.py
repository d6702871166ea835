"""Key-value caches whose tokens are split over ranks."""

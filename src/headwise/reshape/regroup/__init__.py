"""Let query heads share keys and values."""

"""Remove heads."""

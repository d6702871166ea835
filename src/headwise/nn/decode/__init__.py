"""Decode one token at a time through the modules."""

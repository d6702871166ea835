"""Files and folders that are written whole or not at all, text made safe to print, and strict JSON.

Imports nothing of headwise and no other library, so every room may import it.
"""

"""Atomic files and folders, text that is safe to print, and strict JSON.

Imports nothing of headwise and no other library, so every module may import it.
"""

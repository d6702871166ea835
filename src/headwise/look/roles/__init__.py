"""Roles of heads: their definitions, their measures, and the controls for comparison."""

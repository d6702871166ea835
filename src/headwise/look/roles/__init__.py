"""The roles of heads: their definitions, their measures, and the controls they are compared with."""

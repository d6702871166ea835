"""Context parallel attention: the layouts, their costs and their messages."""

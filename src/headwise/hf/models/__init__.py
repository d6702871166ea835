"""Support checks and tables for the model classes of transformers."""

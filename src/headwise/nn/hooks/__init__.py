"""Watch or replace the attention of a model as it runs."""

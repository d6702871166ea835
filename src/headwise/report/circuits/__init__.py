"""The page of the heads that read each other."""

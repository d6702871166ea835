"""Options that several commands share, and the input and output that they name."""

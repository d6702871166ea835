"""Options that several commands share, and what they read and write."""

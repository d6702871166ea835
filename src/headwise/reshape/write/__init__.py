"""Write a checkpoint folder, complete or not at all, and verify it."""

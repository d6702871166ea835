"""Write a checkpoint whole or not at all, and verify it."""

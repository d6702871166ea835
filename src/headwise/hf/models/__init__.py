"""What headwise knows about the model classes of transformers."""

"""What is run through the model: token ids, texts, media, repeated tokens, needles."""

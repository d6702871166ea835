"""Inputs of the model: token ids, texts, media, repeated tokens, needles."""

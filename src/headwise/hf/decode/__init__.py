"""The caches of headwise in transformers' generation and continuous batching."""

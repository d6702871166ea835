"""The native CPU kernel as a backend: a call in its terms, the library, the gradient."""

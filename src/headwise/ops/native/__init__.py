"""The native CPU kernel as a backend: the arguments of a call, the library, the gradient."""

"""The kernels themselves: Python that Triton compiles, so no other code may rewrite it (`tests/conftest.py`)."""

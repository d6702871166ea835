"""The parts of a model and what each of them costs."""

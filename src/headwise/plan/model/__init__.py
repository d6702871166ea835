"""The parts of a model and the cost of each."""

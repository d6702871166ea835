"""One transport between the ranks of a job: messages, errors, and the workers of a launch."""

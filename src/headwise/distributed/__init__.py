"""Communication between the ranks of a job: messages, errors, and the processes of a launch."""

"""Where an answer stands in a completion, what it is worth, and when two of them are equal."""

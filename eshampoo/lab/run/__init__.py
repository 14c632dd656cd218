"""One run: the data that define it, the loop that trains it, its log and its checkpoints."""

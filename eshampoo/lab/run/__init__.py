"""One run: what decides it, the loop that trains it, its log and its checkpoints."""

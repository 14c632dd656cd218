"""What is kept, and where: blocks of parameters, their stacked state, checkpoints."""

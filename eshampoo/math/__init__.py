"""Linear algebra on stacks of blocks: no module here imports anything else from the library."""

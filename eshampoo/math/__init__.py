"""Linear algebra on stacks of blocks: no module here knows anything else of the library."""

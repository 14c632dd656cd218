"""Work that is shared over ranks; imported only where parameters or a process group ask for it.

A block is preconditioned whole by one rank, its owner. Every step, the ranks that hold a piece of
the block send that piece of the gradient to the owner, and the owner sends the update back: two
all-to-alls per bucket. Where a piece lies follows from the parameter's placements alone, so every
rank knows all ways without asking, and they are worked out once.

    FSDP2   Shard(0)               HSDP   Replicate, Shard(0)
    TP      Shard(0) or Shard(1)   DDP    Replicate, with a process group
"""

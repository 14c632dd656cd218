"""Work that ranks share; imported only if there are DTensors or a process group.

Each block has an owner, the rank that preconditions it. Every step, the ranks that hold a piece of
the block send that piece of the gradient to the owner, and the owner sends the update back: two
all-to-alls per bucket. Where a piece lies follows from the parameter's placements alone, so every
rank works out once, without asking, how all pieces travel.

    FSDP2   Shard(0)               HSDP   Replicate, Shard(0)
    TP      Shard(0) or Shard(1)   DDP    Replicate, with a process group
"""

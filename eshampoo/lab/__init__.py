"""The laboratory: train, compare and reproduce on real data (extra ``eshampoo[lab]``).

At the top stands what is opened first: ``cli`` and ``commands`` (what can be typed, and what it
does), ``workloads`` and ``catalogue`` (what is trained), ``optimizers`` and ``objectives``. The
rooms: ``run`` (the one loop, its log and checkpoints), ``report`` (what is made of logs),
``figures`` (the paper's), ``data`` and ``models``.
"""

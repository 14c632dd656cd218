"""The laboratory: train, compare and reproduce on real data (extra ``eshampoo[lab]``).

Open these modules first: ``cli`` and ``commands`` (what users type, and what it does),
``workloads`` and ``catalogue`` (what the lab trains), ``optimizers`` and ``objectives``. The rooms
are ``run`` (the one loop, its log and checkpoints), ``report`` (pages and tables from logs),
``figures`` (the paper's and our own), ``data`` and ``models``.
"""

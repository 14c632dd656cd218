"""The laboratory: train, compare and reproduce on real data (extra ``eshampoo[lab]``).

Reading order: ``workloads`` (what is trained), ``training`` (the one loop), ``runlog`` (what a
run leaves behind), ``compare`` and ``report`` (what is made of it), ``figures`` (the paper's).
"""

"""One step of any method: `step.py` is the whole of it, the other files are its verbs."""

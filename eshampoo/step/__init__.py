"""One step of any method: `step.py` is the whole step, the other files hold what it calls."""

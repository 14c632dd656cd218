"""The paper's figures and our own: which runs they need, and how they are drawn from logs."""

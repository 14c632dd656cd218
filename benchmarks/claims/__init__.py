"""Scripts behind single sentences of the documentation; README.md says which."""

"""Callbacks for frameworks. Each module imports its framework; the library itself imports none."""

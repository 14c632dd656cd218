"""From logs to groups of seeds, a verdict, a table and a page."""

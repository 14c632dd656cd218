"""What is made of logs: groups of seeds, a verdict, a table and a page."""

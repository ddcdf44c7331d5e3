"""What is known of runs, as plain data: for pages, for the command line, and for agents."""

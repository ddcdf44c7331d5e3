"""What is known of runs, as plain data: for pages and for the command line."""

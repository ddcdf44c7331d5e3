"""Pages of HTML that are written for people, and the figures in them."""

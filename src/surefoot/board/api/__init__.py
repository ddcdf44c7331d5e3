"""What the pages ask for, over HTTP: JSON, and events of the server."""

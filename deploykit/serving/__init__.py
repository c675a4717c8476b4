"""The server, which needs the extra [serve], and its client, which needs nothing."""

"""Answers that outlive the connection, and the router, that began them: stored, background, resumable."""

"""Which instance serves a request, and what is remembered of it until its last token."""

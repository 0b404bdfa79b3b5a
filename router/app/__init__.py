"""Routes and middleware of the HTTP application."""

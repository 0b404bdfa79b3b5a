"""Connections, request heads and bodies: what lies below the application."""

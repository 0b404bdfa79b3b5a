"""Dispatch: the choice of an instance, and each request's state until its last token."""

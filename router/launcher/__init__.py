"""The processes of one ``serve``: checks, start, supervision, end."""

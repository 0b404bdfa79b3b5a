"""Ollama's API: ``/api/chat`` and ``/api/generate``, translated to chats and completions and back."""

"""File tier of the KV cache: blocks on disk that outlive their instance."""

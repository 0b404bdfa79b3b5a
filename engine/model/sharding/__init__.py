"""Cut of a model into shards, and its check against the uncut model."""

"""Cut of a model into shards of stages and ranks, and the check of the cut model against the uncut one."""

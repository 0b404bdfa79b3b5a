"""The machine an instance runs on: memory, cores, forked processes."""

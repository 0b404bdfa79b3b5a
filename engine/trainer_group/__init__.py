"""The process that joins a trainer's process group and receives new weights."""

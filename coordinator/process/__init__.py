"""What every process does at its start and end: logging, addresses, tracing."""

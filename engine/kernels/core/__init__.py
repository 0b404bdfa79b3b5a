"""Common base of all kinds of operations: library, operation lists, memory, stand-ins."""

"""What every kind of operation shares: the compiled library, lists of operations, memory, stand-ins."""

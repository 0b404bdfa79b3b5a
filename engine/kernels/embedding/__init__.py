"""The embedding, and inputs that layers have beside the stream."""

"""What a layer stack begins with: the embedding, and inputs that layers have beside the stream."""

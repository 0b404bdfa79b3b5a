"""Writing of operation lists: buffers, the writer, and what a part of a layer must provide."""

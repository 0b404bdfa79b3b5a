"""Writing of operation lists: buffers, the writer, and the contract of layer parts."""

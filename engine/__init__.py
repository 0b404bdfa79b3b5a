"""One headless instance: scheduler, KV cache, workers, and the socket that routers talk to.

Modules that routers use (config, messages, sampling, checkpoint) load no torch.
"""

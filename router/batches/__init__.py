"""Files of requests, answered below all interactive work: OpenAI's batch API, ``lockstep batch``."""

"""One instance as its routers see it: the socket, the step loop, draining."""

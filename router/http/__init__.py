"""HTTP below the application: connections, request heads and bodies, quotas, sockets."""

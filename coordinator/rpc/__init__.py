"""RPC between processes: typed messages over ZeroMQ, mesh keys and admission."""

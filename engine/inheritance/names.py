"""Environment variables and the file name of KV cache memory that outlives its instance."""

MEMORY_VARIABLE = "LOCKSTEP_KV_MEMORY"
"""Environment variable: path of the file for the cache of this instance."""
PREDECESSOR_VARIABLE = "LOCKSTEP_KV_PREDECESSOR"
"""Environment variable: path of the file of the instance that died before this one."""
FILE_NAME = "lockstep-kv"
"""Name of the cache memory files, as shown in ``/proc``."""

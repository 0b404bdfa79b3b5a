"""How shards talk: the contract in ``base``, one file per transport."""

"""Logits and the choice of tokens: the output layer, draws, penalties, log-probabilities."""

"""Second computation of recorded answers, by a model in the same process."""

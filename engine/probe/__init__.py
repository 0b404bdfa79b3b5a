"""Processes that look at what needs torch and answer in JSON, for ``lockstep doctor``, which loads none."""

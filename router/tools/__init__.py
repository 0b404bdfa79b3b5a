"""Commands for people: ``lockstep status``, ``chat``, ``bench``, ``doctor`` and others."""

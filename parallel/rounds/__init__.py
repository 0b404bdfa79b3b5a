"""Rounds: exchanges of tensors in shared memory and over links, in C++ and in Python.

Both languages send the same messages and use the same memory, so members of one group need not agree.
:mod:`parallel.communicators` makes its communicators from them.
"""

"""Tests of the check of saved answers, without a mesh."""

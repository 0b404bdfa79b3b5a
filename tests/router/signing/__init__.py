"""Tests of signatures of capsules."""

"""Flags and settings files, from config structs."""

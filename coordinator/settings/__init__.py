"""Command-line flags and YAML settings files, generated from config structs."""

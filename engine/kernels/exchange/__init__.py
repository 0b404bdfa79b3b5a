"""Exchange between members inside a step: rows of experts, and sums over tensor-parallel ranks."""

"""Low-rank adapters beside products: their matrices as they are laid out, and their operation."""

"""HTTP: one module a dialect, with its pure codec beside it."""

"""Everything behind the backend seam."""

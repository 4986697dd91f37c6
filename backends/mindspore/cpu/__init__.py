"""CPU equivalents of the Ascend operators, in one place."""

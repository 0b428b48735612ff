"""Proof of parity: a layout on CPU ranks against one process with the same weights and batches."""

"""evenspan: sequence-parallel training whose arithmetic is exactly that of one process."""

__version__ = "0.1.0"

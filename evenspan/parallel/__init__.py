"""The only code that changes a model: context exchange, activation checkpointing, FSDP2."""

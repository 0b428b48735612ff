"""Single-device models and their objectives; nothing here knows of ranks."""

"""Collectives named by the layout change they make, with adjoints, and their measurement."""

"""Rules that find every configuration error before any process starts."""

"""Samples and their randomness: videos, latents, prompts, samplers, and each rank's share of them."""

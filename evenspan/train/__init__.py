"""The training loop and what it needs: steps, checkpoints, metrics, evaluation, launch."""

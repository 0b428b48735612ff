"""What a layout costs each rank, computed without running it."""

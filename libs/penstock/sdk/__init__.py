"""What a training script and other programs import."""

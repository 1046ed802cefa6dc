"""What every experiment shares: flags, data plumbing, the training loop, checkpoints and logs."""

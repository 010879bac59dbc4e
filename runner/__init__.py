"""A config-driven experiment runner for PyTorch training, with an honest record of every run."""

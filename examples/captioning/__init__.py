"""The parts of train_captioning.py."""

"""The parts of `train_translation.py`: data, training loop, decoding, measurements and record. Copy what you need."""

"""CUDA graphs: a training step as one graph (training_step.py), and how work is captured (capture.py)."""

"""The stand-in for CUDA graphs lies a folder up."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

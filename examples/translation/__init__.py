"""The parts of `train_translation.py`: data, training loop, checkpoints and decoding. Copy what you need."""

import importlib.util

# Some are used only at the end of a run, so a missing one is reported now.
NEEDED = ("tqdm", "matplotlib", "tokenizers", "sacrebleu")
if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
    raise SystemExit(f'error: {", ".join(missing)} not installed; pip install ".[examples]" brings it')

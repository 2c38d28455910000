"""The parts of `train_translation.py`: data, training loop, decoding, measurements and record. Copy what you need."""

import importlib.util

# Some are first used when a run is over, so a missing one is reported now.
NEEDED = ("tqdm", "matplotlib", "tokenizers", "sacrebleu")
if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
    raise SystemExit(f'error: {", ".join(missing)} not installed; pip install ".[examples]" brings it')

"""The smallest model of the translation example, and a short run on dates, as options of its command."""

TINY = ["--layers", "1", "--d-model", "16", "--d-inner", "32", "--heads", "2", "--device", "cpu"]
DATES = [*TINY, "--dates", "40", "--held-out", "5", "--batch-tokens", "256", "--warmup", "10", "--max-length", "48"]

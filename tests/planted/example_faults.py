"""Faults in the examples."""

from planted.fault import Fault

CHECKPOINT, DATA, PREPARE, TRAINING, TEXT, DECODING = (
    f"examples/translation/{name}.py" for name in ("checkpoint", "data", "prepare", "training", "text", "decoding")
)
COMMAND, TRANSLATE, CAPTIONING = (
    f"examples/{name}.py" for name in ("train_translation", "translate", "train_captioning")
)
T = "tests/examples/test_"
OF_TRAINING, OF_COMMAND = T + "training.py", T + "train_translation.py"
OF_TEXT, OF_TRANSLATE, OF_CAPTIONING = T + "text.py", T + "translate.py", T + "train_captioning.py"

FAULTS: list[Fault] = [
    Fault("validation loss divided by all tokens", TRAINING,
        "        tokens += step.target_tokens", "        tokens += step.tokens", OF_COMMAND + " -k candidates"),
    Fault("validation loss with label smoothing", TRAINING,
        "step.parts[0], settings, 0.0)", "step.parts[0], settings, settings.label_smoothing)",
        OF_COMMAND + " -k candidates"),
    Fault("validation with dropout", TRAINING, "    model.eval()\n", "", OF_COMMAND + " -k candidates"),
    Fault("mean of one checkpoint too many", CHECKPOINT,
        "last - run.settings.average + 2", "last - run.settings.average + 1", OF_COMMAND + " -k mean_of"),
    Fault("an epoch's loss is not weighted by its tokens", TRAINING,
        "np.average(losses, weights=weights)", "np.average(losses)", OF_COMMAND + " -k prints"),
    Fault("a resumed epoch repeats a batch", DATA,
        "range(skip, len(self.plan))", "range(max(skip - 1, 0), len(self.plan))", OF_COMMAND + " -k interrupted"),
    Fault("every epoch has one order", TRAINING,
        "default_rng([self.settings.seed, self.progress.epoch])", "default_rng(self.settings.seed)", OF_TRAINING),
    Fault("random numbers are not restored", CHECKPOINT,
        "            torch.set_rng_state(content", "            torch.ByteTensor(content",
        OF_COMMAND + " -k interrupted"),
    Fault("the worst candidate is kept", COMMAND,
        "kept = min(values", "kept = max(values", OF_COMMAND + " -k candidates"),
    Fault("patience of one epoch more", TRAINING,
        '- best["epoch"] >= settings.patience', '- best["epoch"] > settings.patience', OF_COMMAND + " -k patience"),
    Fault("of several parts the last one counts", TRAINING,
        "return torch.stack(losses).sum()", "return losses[-1]", OF_TRAINING),
    Fault("a share without a sentence", DATA,
        "collate(self.examples, dealt if", "collate(self.examples, dealt[:-1] if", OF_TRAINING),
    Fault("translations in the order of their lengths", DECODING,
        "zip(chosen, results, strict=True)", "zip(sorted(chosen), results, strict=True)", OF_TRANSLATE),
    Fault("--lowercase is not applied to what is translated", TRANSLATE,
        "text.lower() if settings.lowercase else text", "text", OF_TRANSLATE),
    Fault("attention of the token after", TRANSLATE, "[[BOS, *ids]]", "[[*ids, BOS]]", OF_TRANSLATE),
    Fault("scores of CTranslate2 by its own length", DECODING,
        "(len(ids) / (len(ids) + 1)) ** LENGTH_PENALTY", "1", OF_TRANSLATE + " -k engines"),
    Fault("columns in the wrong order", TEXT, "columns_of(line)[::-1]", "columns_of(line)", OF_TEXT),
    Fault("of equal pairs the first is left out", PREPARE,
        "            seen.add(key)\n            yield pair", "            yield pair\n            seen.add(pair)",
        OF_TEXT),
    Fault("pairs begin at 0 in every chunk", PREPARE, "position += len(examples.tokens)", "position = 0",
        OF_TEXT + " --full -k 20000"),
    Fault("a resumed run forgets its data", CHECKPOINT,
        'if content["data"] != data:', "if False:", OF_COMMAND + " -k prepared"),
    Fault("captions are not reversed for a decoder", "examples/captioning/scenes.py",
        "reversed(words) if backwards else words", "words", OF_CAPTIONING),
    Fault("captioning's validation loss of one direction", CAPTIONING,
        "    return sum(losses) / 2", "    return losses[1]", OF_CAPTIONING),
]  # fmt: skip

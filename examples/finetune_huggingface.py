"""Train a Marian with transformers' Trainer on fastattn, on made-up pairs: "one two three" -> "three two one".

    python examples/finetune_huggingface.py [--out DIR] [--steps N] [--freeze encoder] [--model FOLDER --pairs FILE]

--model: a folder with a saved encoder-decoder model and its tokenizer, in place of a new Marian. --pairs: UTF-8 text,
plain or .gz, in lines of source, tab, target. --freeze encoder: train the rest alone, and print what that saves; an
embedding that both sides share is the encoder's too. The command continues from the last checkpoint in --out,
which needs the same --freeze.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import time
from collections.abc import Callable
from itertools import accumulate, product
from pathlib import Path

import torch
import transformers
from command_line import CommandError, columns_of, command, new_parser, pairs_of, positive, run_command, writing
from torch.nn.utils.rnn import pad_sequence
from transformers.trainer_utils import get_last_checkpoint

import fastattn


class Digits:
    """The tokenizer of the made-up pairs."""

    words = ("<pad>", "</s>", "<s>", *"zero one two three four five six seven eight nine".split())

    def encode(self, text: str) -> list[int]:
        return [*map(self.words.index, text.split()), 1]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(self.words[i] for i in ids if i > 2)

    def pairs(self, count: int) -> list[tuple[str, str]]:
        drawn = [random.choices(self.words[3:], k=random.randint(2, 7)) for _ in range(count)]
        return [(" ".join(words), " ".join(reversed(words))) for words in drawn]

    def model(self) -> transformers.MarianMTModel:
        sizes = {"layers": 2, "attention_heads": 4, "ffn_dim": 256}
        options = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
        ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2, "forced_eos_token_id": 1}
        options |= {"vocab_size": len(self.words), "d_model": 64, "init_std": 0.1, "scale_embedding": True, **ids}
        return transformers.MarianMTModel(transformers.MarianConfig(**options))


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--model", type=Path, metavar="FOLDER")
    parser.add_argument("--pairs", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, default=Path("finetuned"), metavar="DIR")
    parser.add_argument("--steps", type=positive, default=400, metavar="N")
    parser.add_argument("--freeze", choices=("encoder",))
    options = parser.parse_args(argv)
    if (options.model is None) is not (options.pairs is None):
        parser.error("--model and --pairs go together")
    return options


def freeze(model: torch.nn.Module, part: torch.nn.Module, compute_loss: Callable[[], torch.Tensor]) -> None:
    """Freezes a part of the model. Prints what a step needs with and without it: the least of five, in turn."""
    ms, mib, adam = {True: math.inf, False: math.inf}, {}, {}
    for n, is_trained in product(range(5), (True, False)):
        part.requires_grad_(is_trained)
        profiled = torch.profiler.profile(profile_memory=True) if n == 1 else contextlib.nullcontext()
        with profiled:
            started = time.perf_counter()
            compute_loss().backward()
            model.zero_grad()
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            ms[is_trained] = min(ms[is_trained], (time.perf_counter() - started) * 1e3)
        if n == 1:
            events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
            mib[is_trained] = max(accumulate(e.nbytes() for e in events if e.name() == "[memory]")) / 2**20
        adam[is_trained] = sum(2 * p.nbytes for p in model.parameters() if p.requires_grad) / 2**20
    print("A step with a frozen encoder, and without:")
    for found, unit in (ms, "ms, forward and backward"), (mib, "MiB of tensors in it"), (adam, "MiB of Adam's state"):
        print(f"{found[False]:10.4g} {found[True]:10.4g}  {unit}")


def run(options: argparse.Namespace) -> None:
    if options.model:
        if not (pairs := list(pairs_of(options.pairs, columns_of))):
            raise CommandError(f"{options.pairs}: holds no pair")
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, local_files_only=True)
            model = transformers.AutoModelForSeq2SeqLM.from_pretrained(options.model, local_files_only=True)
        except (OSError, ValueError) as error:
            raise CommandError(f"{options.model}: cannot be loaded: {' '.join(str(error).split())}") from error
    else:
        tokenizer = Digits()
        model, pairs = tokenizer.model(), tokenizer.pairs(10_000)

    with writing(options.out):
        options.out.mkdir(parents=True, exist_ok=True)
    report = fastattn.accelerate(model)  # this makes the model fast
    print(report)

    class Trainer(transformers.Seq2SeqTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            def without_logits(**batch):  # and this its loss
                return {"loss": report.loss(model, **batch)}

            call = model if return_outputs else without_logits
            return super().compute_loss(call, inputs, return_outputs, num_items_in_batch)

    def collate(batch: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
        sources, targets = ([torch.tensor(tokenizer.encode(pair[i])) for pair in batch] for i in (0, 1))
        input_ids = pad_sequence(sources, batch_first=True, padding_value=model.config.pad_token_id)
        real = torch.arange(input_ids.shape[1]) < torch.tensor([len(ids) for ids in sources])[:, None]
        labels = pad_sequence(targets, batch_first=True, padding_value=-100)
        return {"input_ids": input_ids, "attention_mask": real.long(), "labels": labels}

    settings = {"per_device_train_batch_size": 64, "learning_rate": 2e-3, "max_steps": options.steps}
    settings |= {"save_steps": 200, "logging_steps": 50, "remove_unused_columns": False, "report_to": []}
    settings["dataloader_pin_memory"] = torch.cuda.is_available()
    arguments = transformers.Seq2SeqTrainingArguments(options.out, **settings)
    trainer = Trainer(model, arguments, train_dataset=pairs, data_collator=collate)
    if options.freeze:
        batch = {name: t.to(model.device) for name, t in collate(pairs[:64]).items()}
        freeze(model, model.get_encoder(), lambda: report.loss(model, **batch))
    trainer.train(resume_from_checkpoint=get_last_checkpoint(options.out))
    trainer.save_model()

    batch = {name: t.to(model.device) for name, t in collate(pairs[:3]).items() if name != "labels"}
    found = model.eval().generate(**batch, num_beams=4, max_new_tokens=32)
    for (source, target), ids in zip(pairs, found.tolist(), strict=False):
        print(f"{source} -> {tokenizer.decode(ids, skip_special_tokens=True)} (expected: {target})")


main = command(parse_arguments, run)

if __name__ == "__main__":
    run_command(main)

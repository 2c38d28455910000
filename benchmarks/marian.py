"""Marian models of Hugging Face with random weights, of the shape of a case, and their conversion for CTranslate2.

python benchmarks/marian.py FOLDER DEVICE THREADS     serves a converted model, see `Served`
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

EOS, BOS = 1, 2  # the padding is the vocabulary's last word, as CTranslate2 wants it


def build(case: Any) -> Any:
    """A MarianMTModel in eval mode. case: a cases.DecodingCase."""
    import transformers

    transformers.logging.set_verbosity_error()
    layers, heads = case.n_layers, case.n_head
    config = transformers.MarianConfig(
        vocab_size=case.n_vocab, d_model=case.d_model, scale_embedding=True, activation_function="relu",
        encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads, decoder_attention_heads=heads,
        encoder_ffn_dim=case.d_inner, decoder_ffn_dim=case.d_inner,
        max_position_embeddings=max(case.length, case.new_tokens + 1) + 1,
        pad_token_id=case.n_vocab - 1, decoder_start_token_id=case.n_vocab - 1, eos_token_id=EOS, bos_token_id=BOS,
        forced_eos_token_id=None, share_encoder_decoder_embeddings=True,
    )  # fmt: skip
    return transformers.MarianMTModel(config).eval()


def convert(model: Any, folder: Path) -> None:
    """Write the model as CTranslate2 reads it. Its words are w0, w1, .."""
    from ctranslate2.converters.transformers import MarianMTLoader

    spec = MarianMTLoader().get_model_spec(model)
    words = [f"w{i}" for i in range(model.config.vocab_size - 1)]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = f"w{BOS}", f"w{EOS}", "w3"
    spec.config.decoder_start_token = f"w{EOS}"
    spec.config.add_source_eos = False
    spec.validate()
    spec.optimize()
    spec.save(str(folder))


class Served:
    """A converted model in a process of its own, whose idle threads then take no time from other providers.

    translate() has it translate once and waits; the process ends with the object.
    """

    def __init__(
        self, model: Any, sources: list[list[int]], beam: int, new_tokens: int, device: str, dtype: str, threads: int
    ) -> None:
        self.folder = tempfile.TemporaryDirectory()
        folder = Path(self.folder.name)
        (folder / "model").mkdir()
        convert(model, folder / "model")
        words = [[f"w{i}" for i in source] for source in sources]
        task = {"words": words, "beam": beam, "new_tokens": new_tokens, "dtype": dtype}
        (folder / "task.json").write_text(json.dumps(task))
        command = [sys.executable, __file__, str(folder), device, str(threads)]
        environment = os.environ | {"KMP_BLOCKTIME": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.translate()

    def translate(self) -> None:
        """RuntimeError with the process's reason where it cannot."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        if answer != "done":
            raise RuntimeError(answer or "the process ended")

    def __del__(self) -> None:
        if hasattr(self, "process"):
            self.process.stdin.close()
            self.process.wait()


def serve(folder: Path, device: str, threads: int) -> None:
    """Translate the task for each line of standard input."""
    import ctranslate2

    task = json.loads((folder / "task.json").read_text())
    options = {"compute_type": task["dtype"], "inter_threads": 1, "intra_threads": threads}
    limits = {"min_decoding_length": task["new_tokens"], "max_decoding_length": task["new_tokens"]}
    translator = None
    for _ in sys.stdin:
        try:
            translator = translator or ctranslate2.Translator(str(folder / "model"), device, **options)
            found = translator.translate_batch(task["words"], beam_size=task["beam"], max_batch_size=0, **limits)
            short = any(len(result.hypotheses[0]) != task["new_tokens"] for result in found)
            print("some translations are shorter" if short else "done", flush=True)
        except (RuntimeError, ValueError) as error:
            print(str(error).splitlines()[0], flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))

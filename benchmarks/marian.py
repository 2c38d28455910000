"""Hugging Face's Marian models with random weights, in the shape of a case, and their conversion for CTranslate2."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest.mock import patch

EOS, BOS = 1, 2  # the padding is the vocabulary's last word: CTranslate2 needs it there


def build(case: Any) -> Any:
    """A MarianMTModel in eval mode. case: a cases.DecodingCase."""
    import transformers

    transformers.logging.set_verbosity_error()
    sizes = {
        f"{stack}_{name}": size
        for stack in ("encoder", "decoder")
        for name, size in (("layers", case.n_layers), ("attention_heads", case.n_head), ("ffn_dim", case.d_inner))
    }
    pad = case.n_vocab - 1
    tokens = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": EOS, "bos_token_id": BOS}
    config = transformers.MarianConfig(
        vocab_size=case.n_vocab,
        d_model=case.d_model,
        scale_embedding=True,
        activation_function="relu",
        max_position_embeddings=max(case.length, case.new_tokens + 1) + 1,
        forced_eos_token_id=None,
        share_encoder_decoder_embeddings=True,
        **sizes,
        **tokens,
    )
    return transformers.MarianMTModel(config).eval()


def convert(model: Any, folder: str) -> None:
    """Write the model in CTranslate2's format. Its words are w0, w1, .."""
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
    spec.save(folder)


def ctranslate2_process(
    model: Any, sources: list[list[int]], beam: int, new_tokens: int, device: str, dtype: str, threads: int
) -> Callable[[], None]:
    """A function that translates the sources once, in another process: the idle threads of CTranslate2 spin there for a
    short time only, so other providers do not become slower. The process ends with the function.

    RuntimeError or ValueError where CTranslate2 cannot translate them.
    """
    words = [[f"w{i}" for i in source] for source in sources]
    options = {"compute_type": dtype, "inter_threads": 1, "intra_threads": threads}
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, KMP_BLOCKTIME="1"):
        convert(model, folder)
        pool.submit(_load, folder, device, options, words, beam, new_tokens).result()

    def translate() -> None:
        pool.submit(_translate).result()

    translate()
    return translate


_task: dict[str, Any] = {}  # of the other process


def _load(
    folder: str, device: str, options: dict[str, Any], words: list[list[str]], beam: int, new_tokens: int
) -> None:
    import ctranslate2

    limits = {"beam_size": beam, "min_decoding_length": new_tokens, "max_decoding_length": new_tokens}
    _task["translator"] = ctranslate2.Translator(folder, device, **options)
    _task["arguments"] = {"source": words, "max_batch_size": 0, **limits}


def _translate() -> None:
    found, arguments = _task["translator"].translate_batch(**_task["arguments"]), _task["arguments"]
    if any(len(result.hypotheses[0]) != arguments["max_decoding_length"] for result in found):
        raise RuntimeError("some translations are shorter")

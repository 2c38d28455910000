"""CTranslate2, in another process, translating with an exported FusedTransformer."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fastattn import FusedTransformer

PAD, UNKNOWN, BOS = 0, 1, 2  # CTranslate2 needs a word that ends a sentence: padding, which never occurs


def ctranslate2_process(
    model: FusedTransformer,
    sources: list[list[int]],
    beam: int,
    new_tokens: int,
    device: str,
    dtype: str,
    threads: int,
) -> Callable[[], None]:
    """A function that translates the sources once, in another process: the idle threads of CTranslate2 spin there for a
    short time only, so other providers do not become slower. The process ends with the function.

    ImportError where CTranslate2 is not installed; RuntimeError or ValueError where it cannot translate them.
    """
    from fastattn.integrations.ctranslate2 import export

    words = [f"w{i}" for i in range(model.trg_word_prj.out_features)]
    options = {"compute_type": dtype, "inter_threads": 1, "intra_threads": threads}
    limits = {"beam_size": beam, "min_decoding_length": new_tokens, "max_decoding_length": new_tokens}
    task = {"source": [[words[i] for i in source] for source in sources], "max_batch_size": 0, **limits}
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with tempfile.TemporaryDirectory() as parent, patch.dict(os.environ, KMP_BLOCKTIME="1"):
        folder = str(Path(parent, "model"))
        export(model, folder, words, words, bos_idx=BOS, eos_idx=PAD, unk_idx=UNKNOWN)
        pool.submit(_load, folder, device, options, task).result()

    def translate() -> None:
        pool.submit(_translate).result()

    translate()
    return translate


_task: dict[str, Any] = {}  # of the other process


def _load(folder: str, device: str, options: dict[str, Any], task: dict[str, Any]) -> None:
    import ctranslate2

    _task["translator"], _task["arguments"] = ctranslate2.Translator(folder, device, **options), task


def _translate() -> None:
    found, arguments = _task["translator"].translate_batch(**_task["arguments"]), _task["arguments"]
    if any(len(result.hypotheses[0]) != arguments["max_decoding_length"] for result in found):
        raise RuntimeError("some translations are shorter")

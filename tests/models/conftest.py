"""Fixtures of the model tests."""

import pytest
import torch
from helpers import skip_without_triton
from model_checks import DEVICE, PAD_SRC, PAD_TRG, VOCAB

import fastattn.backends.cuda


@pytest.fixture
def batch():
    """Three sentence pairs, (3, 11) and (3, 9), padded at the end to different lengths."""
    generator = torch.Generator().manual_seed(3)
    src = torch.randint(3, VOCAB, (3, 11), generator=generator)
    trg = torch.randint(3, VOCAB, (3, 9), generator=generator)
    src[1, 7:], src[2, 4:], trg[0, 8:], trg[2, 5:] = PAD_SRC, PAD_SRC, PAD_TRG, PAD_TRG
    return src.to(DEVICE), trg.to(DEVICE)


@pytest.fixture
def triton():
    skip_without_triton()


@pytest.fixture
def cuda(request):
    """Skips, with the reason, where the CUDA kernels cannot run. Without a GPU they run through csrc/emulator."""
    if DEVICE == "cpu":
        request.getfixturevalue("emulator")
    if reason := fastattn.backends.cuda.refuse_device(torch.empty(0, device=DEVICE)):
        pytest.skip(reason)
